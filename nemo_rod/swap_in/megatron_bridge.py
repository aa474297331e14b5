"""The host Megatron-Bridge: swaps the selector into its `pretrain(cfg, forward_step)`.

    megatron.bridge.training.train.train_step                 its schedule selects first
    megatron.bridge.data.loaders
        .get_train_valid_test_num_samples                     requests m times the training samples
        .build_train_valid_test_datasets                      exposes the job's training data
        .build_pretraining_data_loader                        resumes at m times the offset

The names are module globals, the same from 0.3.1 to main. Arguments are bound by name, as their
order differs between versions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_rod.loggers import show
from nemo_rod.selection import Policy
from nemo_rod.swap_in.blend import Blend
from nemo_rod.swap_in.job import SelectingJob, check_multiplier
from nemo_rod.swap_in.job_references import score_blend
from nemo_rod.swap_in.megatron_bridge_checks import INSTALLED, check_version, refuse
from nemo_rod.swap_in.patches import Installed
from nemo_rod.swap_in.roles import Roles
from nemo_rod.upstream.changes import operation_counters


def install(
    cfg: Any,
    *,
    roles: Roles,
    references: Sequence[str | Path] = (),
    policy: Policy | None = None,
    multiplier: int = 2,
    out: str | Path | None = None,
) -> Installed:
    """Makes the job that `pretrain(cfg, ...)` runs choose what it trains on.

    Args:
        cfg: the job's ConfigContainer.
        roles: role of each of the job's sources, adaptation or replay; see `roles.py`.
        references: folders of reference losses for all of the job's data, written by `reference`.
        policy: policy that chooses the batch from a pool; `Joint()` by default.
        multiplier: candidates per trained sample (m), a whole number.
        out: folder for `curriculum.rod` and `metrics.jsonl`; by default `rod/` in the job's
            checkpoint folder, and none if the job saves no checkpoints.

    Returns:
        A handle that can `uninstall()`; also a context manager.

    Raises:
        ValueError: the version or a feature is not supported, or the roles or references do not
            fit the job.
    """
    check_version()
    refuse(cfg, roles)
    if out is None and cfg.checkpoint.save is not None:
        out = Path(cfg.checkpoint.save) / "rod"
    trainer = _Trainer()
    job = SelectingJob(
        references=references,
        policy=policy,
        multiplier=multiplier,
        out=None if out is None else Path(out),
        log=trainer.log,
        unused=_unused(cfg.dataset),
        around_scoring=trainer.same_counters,
    )

    def ready(blend: Blend) -> None:
        job.ready(blend, batch_size=cfg.train.global_batch_size, seed=cfg.dataset.random_seed)

    installed = Installed()
    _show_data(installed, cfg, roles, multiplier, ready)
    _select(installed, job, trainer)
    return installed


def reference(
    cfg: Any,
    forward_step: Callable,
    *,
    role: str,
    out: str | Path,
    roles: Roles,
    multiplier: int = 2,
    checkpoint: str | Path | None = None,
) -> None:
    """Writes a checkpoint's losses on all samples of one role that the job may draw.

    The job's own `setup` builds the data, builds the model in the job's layout and loads it.

    Args:
        cfg: the ConfigContainer of the job that will select; it is not modified.
        forward_step: the job's own forward step.
        role: "adaptation", for the specialist, or "replay", for the model that training starts
            from.
        out: folder of the references, one per role.
        roles: roles of the sources, as for `install`.
        multiplier: candidates per trained sample, as for `install`.
        checkpoint: folder of the reference model's checkpoints, in the job's format; by default
            `cfg.checkpoint.pretrained_checkpoint`, or else `cfg.checkpoint.load`.

    Raises:
        ValueError: there is no such checkpoint, or selection refuses the job.
    """
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.utils.train_utils import prepare_forward_step_func

    check_version()
    check_multiplier(multiplier)
    refuse(cfg, roles)
    cfg, state, blends = _for_scoring(cfg, checkpoint), GlobalState(), list[Blend]()
    began_here = not dist.is_initialized()
    try:
        with Installed() as installed:
            _show_data(installed, cfg, roles, multiplier, blends.append)
            runtime_config_update(cfg)
            state.cfg = cfg
            ready = setup(state, get_dataset_provider(cfg.dataset))
        score_blend(
            blends[0],
            ready.model,
            ready.pg_collection,
            prepare_forward_step_func(forward_step, state),
            out=Path(out),
            role=role,
            micro_batch_size=cfg.train.micro_batch_size,
        )
    finally:  # so that the process can train, or score again
        destroy_global_state()
        if began_here and dist.is_initialized():
            dist.destroy_process_group()


def _unused(data: Any) -> tuple[str, ...]:
    """Returns the attention mask's key if the dataset creates a mask that the trainer ignores."""
    skipped = getattr(data, "skip_getting_attention_mask_from_dataset", True)
    return ("attention_mask",) if skipped else ()


def _for_scoring(cfg: Any, checkpoint: str | Path | None) -> Any:
    """Returns a copy of the job's configuration that only loads weights and saves nothing."""
    from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

    cfg = copy.deepcopy(cfg)
    folder = checkpoint or cfg.checkpoint.pretrained_checkpoint or cfg.checkpoint.load
    if folder is None or not checkpoint_exists(str(folder)):
        raise ValueError(
            f"There is no checkpoint in {folder}, so there is no reference model: expected a "
            "folder that this job, or its specialist, has saved; set 'checkpoint'."
        )
    cfg.checkpoint.load, cfg.checkpoint.pretrained_checkpoint = str(folder), None
    cfg.checkpoint.finetune, cfg.checkpoint.save = True, None  # weights only; starts at step 0
    cfg.dataset.num_workers, cfg.dataset.persistent_workers = 0, False
    return cfg


def _show_data(
    installed: Installed,
    cfg: Any,
    roles: Roles,
    multiplier: int,
    built: Callable[[Blend], None],
) -> None:
    """Gives the job m times the training samples, and passes their blend to `built`.

    With virtual pipeline stages the trainer builds the same data once per stage.
    """
    from megatron.bridge.data import loaders

    count = loaders.get_train_valid_test_num_samples
    build = loaders.build_train_valid_test_datasets
    load = loaders.build_pretraining_data_loader
    load_signature = inspect.signature(load)
    train_sets: list[Any] = []

    def more_samples(cfg: Any) -> tuple[int, int, int]:
        train, valid, test = count(cfg)
        return train * multiplier, valid, test

    def shown(*args: Any, **kwargs: Any) -> tuple:
        train, valid, test = build(*args, **kwargs)
        train_sets.append(train)
        # precision and overlap settings reach the model's configuration only when the job starts
        refuse(cfg, roles)
        in_order = cfg.dataset.dataloader_type == "single"  # else it draws from all samples
        num_samples = more_samples(cfg)[0] if in_order else len(train)
        built(Blend(train, roles, num_samples=num_samples))
        return train, valid, test

    def resumed(*args: Any, **kwargs: Any) -> Any:
        call = load_signature.bind(*args, **kwargs).arguments
        if any(call["dataset"] is train for train in train_sets):
            call["consumed_samples"] *= multiplier
        return load(**call)

    installed.replace(loaders, "get_train_valid_test_num_samples", more_samples)
    installed.replace(loaders, "build_train_valid_test_datasets", shown)
    installed.replace(loaders, "build_pretraining_data_loader", resumed)


def _select(installed: Installed, job: SelectingJob, trainer: _Trainer) -> None:
    """Makes every training step select before it runs forward-backward."""
    from megatron.bridge.training import train

    train_step = train.train_step
    signature = inspect.signature(train_step)

    def rod_train_step(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        trainer.state = call["global_state"]
        call["forward_backward_func"] = job.around(
            call["forward_backward_func"],
            step=trainer.state.train_state.step,
            groups=call["pg_collection"],
        )
        return train_step(**call)

    setattr(rod_train_step, INSTALLED, True)
    installed.replace(train, "train_step", rod_train_step)


class _Trainer:
    """Access to the trainer's GlobalState, which is set at its first step."""

    state: Any = None

    @contextmanager
    def same_counters(self) -> Iterator[None]:
        """Excludes the scoring pass from the trainer's operation counters."""
        before = operation_counters(self.state)
        yield
        vars(self.state).update(before)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in TensorBoard, W&B and MLflow, if the job writes them."""
        show(self.state, step + 1, metrics)  # as the trainer counts what it logs
