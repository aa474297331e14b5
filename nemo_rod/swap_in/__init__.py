"""Replay on Demand inside a training job that already exists.

    import nemo_rod
    nemo_rod.install("megatron_bridge", cfg, references=[...], roles={...}, multiplier=2)
    pretrain(cfg, forward_step)                     # unchanged

The job keeps its data, its iterators and its forward step; candidates come from its own iterators.
One module per host defines where to bind; everything else is independent of the host:

    roles.py           which source is adaptation, which is replay
    blend.py           the job's training data as blocks with ids and hashes
    stream.py          micro-batches: drawing more of them, passing winners on to the replicas
    readers.py         broadcasts from the rank of each replica that reads data
    host_selector.py   StreamSelector.around(schedule, step, groups): replaces the host's schedule
    step_record.py     the curriculum and the metrics of such a job
    job_references.py  reference losses of the job's own data
    job.py             the user's options, and the selector built from them
    megatron_bridge.py, megatron_lm.py, nemo2.py    the hosts, each with its ..._checks.py

A host does four things: it refuses features that selection does not work with; it scales the length
and the resume offset of the train split by the multiplier; it passes the job's dataset as a `Blend`
to `SelectingJob.ready` once it is built; and it replaces the schedule of every training step by
`SelectingJob.around`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

HOSTS = ("megatron_bridge", "megatron_lm", "nemo2")


def install(host: str, *args: Any, **options: Any) -> Any:
    """Swaps the selector into a host's training loop.

    Args:
        host: name of the host, one of `HOSTS`.
        args: positional arguments of that host's `install`, its configuration first.
        options: its keyword arguments: `roles`, `references`, `policy`, `multiplier`, `out`.

    Returns:
        A handle whose `uninstall()` removes the selector again; also a context manager.

    Raises:
        ValueError: the host is unknown; its version or a feature is not supported; or the data or
            references do not fit.
    """
    return _module(host).install(*args, **options)


def reference(host: str, *args: Any, **options: Any) -> None:
    """Writes reference losses of a job's own data.

    Args:
        host: name of the host, one of `HOSTS`.
        args: positional arguments of that host's `reference`, its configuration first.
        options: its keyword arguments: `role`, `out`, `roles`, `multiplier`, `checkpoint`.

    Raises:
        ValueError: the host is unknown, or something is not supported or missing.
    """
    _module(host).reference(*args, **options)


def score(host: str, *args: Any, **options: Any) -> None:
    """Calls `reference`; deprecated former name."""
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
