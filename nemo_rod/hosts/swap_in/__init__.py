"""Replay on Demand inside a training job that already exists.

    import nemo_rod
    nemo_rod.install("megatron_bridge", cfg, references=[...], roles={...}, multiplier=2)
    pretrain(cfg, forward_step)                     # unchanged

The job keeps its data, its iterators and its forward step; candidates are samples
of its own data, by their place in it.
One module per host defines where to bind; everything else is independent of the host:

    roles.py           which source is adaptation, which is replay
    job_data.py        the job's training data as blocks with ids, and the pools of its steps
    job.py             the job that selects
    job_references.py  the job that writes reference losses of its own data
    megatron_bridge.py, megatron_lm.py    the hosts

A host does four things: it refuses features that selection does not work with; it scales the length
of the train split by the multiplier, and passes the job's datasets to `Job.take_data`; it replaces
the schedule of every training step by `SelectingJob.around`, which chooses by
`nemo_rod.megatron.rod_selector`, as our own jobs do; and it calls `SelectingJob.end_step` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, Unpack, overload

from nemo_rod import parts
from nemo_rod.hosts.job_policy import Watch

if TYPE_CHECKING:
    from nemo_rod.hosts.swap_in.job import Installed
    from nemo_rod.selection import OnNonfinite, Policy


class _Data(TypedDict, total=False):
    roles: Required[Mapping[str, str] | Mapping[int, str]]
    multiplier: float


class InstallOptions(_Data, total=False):
    """Options of `install`."""

    references: Sequence[str | Path]
    policy: Policy | str
    on_nonfinite: OnNonfinite
    out: str | Path
    validation_every: int | None


class ReferenceOptions(_Data, total=False):
    """Options of `reference`."""

    role: Required[Literal["adaptation", "replay"]]
    out: Required[str | Path]
    checkpoint: str | Path


@overload
def install(
    host: Literal["megatron_bridge"], cfg: Any, /, **options: Unpack[InstallOptions]
) -> Installed: ...
@overload
def install(host: Literal["megatron_lm"], /, **options: Unpack[InstallOptions]) -> Installed: ...
def install(host: str, *args: Any, **options: Any) -> Any:
    """Makes a job select its training samples: swaps the selector into its host's training loop.

    Args:
        host: name of the host, a registered one (`nemo_rod.parts`).
        args: the job: the ConfigContainer of Megatron-Bridge's `pretrain(cfg, ...)`; nothing for
            Megatron-LM.
        options: by keyword:
            roles: role of each of the job's sources, adaptation or replay; see `roles.py`.
            references: folders of reference losses for all of the job's data, written by
                `reference`.
            policy: policy that chooses the batch from a pool, or its name (a registered one, or
                FILE.py:NAME); `Joint()` by default.
            on_nonfinite: treatment of a score that is not finite: "refuse", by default, or
                "exclude" the sample.
            multiplier: candidates per trained sample (m), any number >= 1; by default
                that of `Candidates`, and 1 for a policy that takes them all.
            out: folder for `curriculum.rod` and `metrics.jsonl`; by default `rod/` in the job's
                checkpoint folder, and none if the job saves no checkpoints.
            validation_every: steps between two measurements of held-out losses by source, which are
                also made at the start and the end; by default those between two validations of the
                job itself. 0 for none.

    Returns:
        A handle whose `uninstall()` removes the selector again; also a context manager.

    Raises:
        ValueError: the host is unknown; its version or a feature is not supported; or the roles,
            multiplier or references do not fit the job. Megatron-LM's features and roles are
            checked inside `pretrain`, before the model is built.

    Example:
        >>> roles = {"/data/legal": "adaptation", "/data/old": "replay"}
        >>> references = ["references/legal", "references/old"]
        >>> nemo_rod.install("megatron_bridge", cfg, roles=roles, references=references)
        >>> pretrain(cfg, forward_step)
    """
    return parts.load("hosts", host).install(*args, **options)


def watch(host: str, *args: Any, **options: Any) -> Any:
    """Makes a job measure what it learns and what it forgets, by source; it trains as before.

    Held-out losses by source from before the first step on, F_val, and the losses by source of what
    is trained on are recorded, shown in the job's loggers and by `nemo-rod report`. Nothing is
    chosen, and no references are needed.

    Args:
        host: name of the host, as for `install`, or "plain_torch".
        args: the job, as for `install`; model and store of `RoDBatches` in plain PyTorch.
        options: `roles`, `out` and `validation_every` of `install`; in plain PyTorch, the options
            of `RoDBatches`.

    Returns:
        What `install` returns; in plain PyTorch, `RoDBatches`.

    Raises:
        ValueError: an option is one of selection, or `install` would refuse the job.

    Example:
        >>> roles = {"/data/legal": "adaptation", "/data/old": "replay"}
        >>> nemo_rod.watch("megatron_bridge", cfg, roles=roles)
        >>> pretrain(cfg, forward_step)
    """
    if chosen := {"policy", "references", "multiplier", "on_nonfinite"} & {*options}:
        raise ValueError(
            f"watch(...) chooses nothing, so {min(chosen)}= has no effect there: leave it out, or "
            "call install(...), which selects."
        )
    return install(host, *args, policy=Watch(), **options)  # type: ignore[call-overload]


@overload
def reference(
    host: Literal["megatron_bridge"],
    cfg: Any,
    forward_step: Callable[..., Any],
    /,
    **options: Unpack[ReferenceOptions],
) -> None: ...
@overload
def reference(host: Literal["megatron_lm"], /, **options: Unpack[ReferenceOptions]) -> None: ...
def reference(host: str, *args: Any, **options: Any) -> None:
    """Writes a checkpoint's losses on all samples of one role that a job may draw.

    The job's own code builds the data, builds the model in the job's layout and loads only its
    weights; nothing is saved. On Megatron-LM, this happens once the script calls `pretrain(...)`,
    which writes the losses instead of training, and exits.

    Args:
        host: name of the host, a registered one (`nemo_rod.parts`).
        args: the job that will select, as for `install`; on Megatron-Bridge, also its forward step.
        options: by keyword:
            role: "adaptation", for the specialist, or "replay", for the model that training starts
                from.
            out: folder of the references, one per role.
            roles, multiplier: as for `install`.
            checkpoint: folder of the reference model's checkpoints, in the job's format; by default
                the job's pretrained checkpoint, or else the one that it loads.

    Raises:
        ValueError: the host is unknown; there is no such checkpoint; or selection refuses the job.

    Example:
        >>> from nemo_rod.hosts import swap_in
        >>> options = {"roles": roles, "role": "replay", "out": "references/old"}
        >>> swap_in.reference("megatron_bridge", cfg, forward_step, **options)
    """
    parts.load("hosts", host).reference(*args, **options)
