"""Replay on Demand inside a training job that already exists.

    import nemo_rod
    nemo_rod.install("megatron_bridge", cfg, references=[...], roles={...}, multiplier=2)
    pretrain(cfg, forward_step)                     # unchanged

The job keeps its data, its iterators and its forward step; candidates are what its own iterators
give. One module per host says where to bind; everything else knows no host:

    roles.py      which source is adaptation, which is replay
    blend.py      the job's training data as blocks with ids and hashes
    stream.py     micro-batches: draw more of them, pass winners on to the replicas
    readers.py    what one rank of a replica knows, made known to all
    selector.py   StreamSelector.around(schedule, step, groups): what a host calls instead
    record.py     the curriculum and the metrics of such a job
    references.py reference losses of the job's own data
    job.py          the user's options, and the selector they make
    megatron_bridge.py, megatron_lm.py, nemo2.py    the hosts, each with its ..._checks.py

A host does four things: it refuses what selection does not work with; it scales the length and the
resume offset of the train split by the multiplier; it gives the job's dataset as a `Blend` to
`SelectingJob.ready` once it is built; and it lets `SelectingJob.around` stand in for the schedule
of every training step.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

HOSTS = ("megatron_bridge", "megatron_lm", "nemo2")


def install(host: str, *args: Any, **options: Any) -> Any:
    """Swaps the selector into a host's training loop.

    Args:
        host: one of `HOSTS`.
        args: what that host's `install` takes, its configuration first.
        options: the same by keyword: `roles`, `references`, `policy`, `multiplier`, `out`.

    Returns:
        A handle whose `uninstall()` takes the selector out again; also a context manager.

    Raises:
        ValueError: no such host; a version or a feature of it that is not supported; data or
            references that do not fit.
    """
    return _module(host).install(*args, **options)


def reference(host: str, *args: Any, **options: Any) -> None:
    """Writes reference losses of a job's own data.

    Args:
        host: one of `HOSTS`.
        args: what that host's `reference` takes, its configuration first.
        options: the same by keyword: `role`, `out`, `roles`, `multiplier`, `checkpoint`.

    Raises:
        ValueError: no such host; something that is not supported, or missing.
    """
    _module(host).reference(*args, **options)


def score(host: str, *args: Any, **options: Any) -> None:
    """Calls `reference`, whose former name this is."""
    warnings.warn(
        "swap_in.score is now called swap_in.reference; the next release drops the old name",
        DeprecationWarning,
        stacklevel=2,
    )
    reference(host, *args, **options)


def _module(host: str) -> Any:
    if host not in HOSTS:
        raise ValueError(f"There is no host {host!r}: expected one of {', '.join(HOSTS)}.")
    return importlib.import_module(f"nemo_rod.swap_in.{host}")
