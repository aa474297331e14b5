"""The host NeMo 2.x: swaps the selector into `llm.pretrain(model, data, trainer, ...)`.

    on_megatron_microbatches_start    NeMo's own hook: the schedule of a training step selects first
    data.build                        requests m times the training samples
    data_sampler.transform_dataloader resumes where the last pool ended

A callback does the work; of the job's objects, only two functions of its data module are wrapped.
Checkpoints store the number of candidates drawn, so that a resumed job continues right after them,
even from a checkpoint of a job without selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from nemo_rod.megatron.scoring.forward_only import refuse_unsafe, replaced
from nemo_rod.selection import Policy
from nemo_rod.swap_in.blend import Blend
from nemo_rod.swap_in.job import SelectingJob, check_multiplier
from nemo_rod.swap_in.job_references import score_blend
from nemo_rod.swap_in.nemo2_checks import check_version, refuse
from nemo_rod.swap_in.patches import Installed
from nemo_rod.swap_in.roles import Roles

Options = dict[str, Any]  # NeMo's arguments for its schedule


def install(
    model: Any,
    data: Any,
    trainer: Any,
    *,
    roles: Roles,
    references: Sequence[str | Path] = (),
    policy: Policy | None = None,
    multiplier: int = 2,
    out: str | Path | None = None,
) -> Installed:
    """Makes the job that `llm.pretrain(model, data, trainer)` runs choose what it trains on.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        roles: role of each of the job's sources, adaptation or replay; see `roles.py`.
        references: folders of reference losses for all of the job's data, written by `reference`.
        policy: policy that chooses the batch from a pool; `Joint()` by default.
        multiplier: candidates per trained sample (m), a whole number.
        out: folder for `curriculum.rod` and `metrics.jsonl`; by default `rod/` beside the folder
            of the job's checkpoints, and none if the job saves none.

    Returns:
        A handle that can `uninstall()`; also a context manager.

    Raises:
        ValueError: the version or a feature is not supported, or the roles, multiplier or
            references do not fit the job.
    """
    check_version()
    refuse(model, data, trainer, roles)
    job = SelectingJob(
        references=references,
        policy=policy,
        multiplier=multiplier,
        out=None if out is None else Path(out),
    )
    return _installed(_Selection(job, data, roles), data, trainer, multiplier)


def reference(
    model: Any,
    data: Any,
    trainer: Any,
    *,
    role: str,
    out: str | Path,
    roles: Roles,
    checkpoint: str | Path,
    multiplier: int = 2,
) -> None:
    """Writes a checkpoint's losses on all samples of one role that the job may draw.

    NeMo's own `llm.pretrain` builds the data, builds the model in the job's layout and loads only
    its weights. It ends before its first step and saves nothing.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        role: "adaptation", for the specialist, or "replay", for the model that training starts
            from.
        out: folder of the references, one per role.
        roles: roles of the sources, as for `install`.
        checkpoint: folder of the reference model's checkpoint, in the job's format.
        multiplier: candidates per trained sample, as for `install`.

    Raises:
        ValueError: there is no such checkpoint, or selection refuses the job.
    """
    from nemo import lightning as nl
    from nemo.collections import llm

    check_version()
    check_multiplier(multiplier)
    refuse(model, data, trainer, roles)
    if not Path(checkpoint).is_dir():
        raise ValueError(
            f"There is no checkpoint in {checkpoint}, so there is no reference model: expected a "
            "folder that this job, or its specialist, has saved; set 'checkpoint'."
        )
    scoring = _Scoring(data, roles, multiplier, role=role, out=Path(out))
    resume = nl.AutoResume(restore_config=nl.RestoreConfig(path=str(checkpoint)))
    log = nl.NeMoLogger(log_dir=str(out), name="log", use_datetime_version=False, ckpt=None)
    with _installed(scoring, data, trainer, multiplier):
        try:
            llm.pretrain(model, data, trainer, log=log, resume=resume)
        except _Scored:
            return


def _installed(callback: _WithBlend, data: Any, trainer: Any, multiplier: int) -> Installed:
    build = data.build
    sampler = trainer.strategy.data_sampler or data.data_sampler
    transform = sampler.transform_dataloader

    def build_more(
        trainer_max_steps: int, trainer_val_check_interval: Any, *limits: Any, **named: Any
    ) -> None:
        # both are scaled by m, so that the number of validation samples, which NeMo derives from
        # their quotient, stays the same
        steps, interval = trainer_max_steps * multiplier, trainer_val_check_interval * multiplier
        build(steps, interval, *limits, **named)

    def resume(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(dataloader, "mode", "train") != "train":
            return transform(dataloader, *args, **kwargs)
        drawn = callback.drawn_before(sampler.init_consumed_samples)
        with replaced(sampler, "init_consumed_samples", drawn):
            return transform(dataloader, *args, **kwargs)

    installed = Installed()
    installed.replace(data, "build", build_more)
    if data.num_train_samples is not None:
        installed.replace(data, "num_train_samples", data.num_train_samples * multiplier)
    installed.replace(sampler, "transform_dataloader", resume)
    # first, so that a checkpoint after a step counts the samples that the step drew
    installed.replace(trainer, "callbacks", [callback, *trainer.callbacks])
    return installed


class _WithBlend(Callback):
    """Callback that obtains the job's training data once NeMo has built it."""

    def __init__(self, data: Any, roles: Roles, multiplier: int) -> None:
        self.data, self.roles, self.multiplier = data, roles, multiplier
        self.blend: Blend | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Builds the blend; called after the data module's own `setup`."""
        if stage != "fit":
            return
        train = self.data._train_ds
        wanted = trainer.max_steps * self.multiplier * self.data.global_batch_size
        in_order = self.data.data_sampler.dataloader_type == "single"
        self.blend = Blend(train, self.roles, num_samples=wanted if in_order else len(train))
        self.ready(self.blend, trainer)

    def ready(self, blend: Blend, trainer: Any) -> None:
        """Called once the blend is known; does nothing by default."""

    def drawn_before(self, consumed_samples: int) -> int:
        """Returns the samples of the train split that were drawn before the job starts."""
        return consumed_samples

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses unsafe precision and overlap settings, which the model only has from here on."""
        module = pl_module.module if hasattr(pl_module, "module") else pl_module
        refuse_unsafe(get_model_config(module), trainer.strategy.ddp_config)


class _Selection(_WithBlend):
    """Makes a job's training steps select."""

    def __init__(self, job: SelectingJob, data: Any, roles: Roles) -> None:
        super().__init__(data, roles, job.multiplier)
        self.job = job
        self.drawn: int | None = None  # samples of the train split that all replicas have drawn

    def ready(self, blend: Blend, trainer: Any) -> None:
        saver = trainer.checkpoint_callback
        if self.job.out is None and saver is not None and saver.dirpath:
            self.job.out = Path(saver.dirpath).parent / "rod"
        self.job.ready(blend, batch_size=self.data.global_batch_size, seed=self.data.seed)

    def drawn_before(self, consumed_samples: int) -> int:
        if self.drawn is None:  # the job is new, or continues one without selection
            self.drawn = consumed_samples
        return self.drawn

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """Replaces the schedule in training; called before every training and validation pass."""
        if step.forward_only:
            return
        schedule, step_number = step.forward_backward_func, step.trainer.global_step
        select = self.job.around(schedule, step=step_number, groups=_groups())
        # a cached property of this step only
        step.__dict__["forward_backward_func"] = lambda **call: select(**_as_in_megatron(call))

    def on_train_batch_end(self, *_: Any) -> None:
        """Counts the samples that the step drew."""
        assert self.drawn is not None
        self.drawn += self.multiplier * self.data.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.drawn = state_dict["drawn"]


class _Scored(Exception):
    """Raised when all samples have their loss, to end the job."""


class _Scoring(_WithBlend):
    """Writes reference losses in place of the first training step."""

    def __init__(self, data: Any, roles: Roles, multiplier: int, *, role: str, out: Path) -> None:
        super().__init__(data, roles, multiplier)
        self.role, self.out = role, out

    def on_megatron_microbatches_start(self, step: Any) -> None:
        if step.forward_only:
            return
        assert self.blend is not None
        given = {"model": step.model, "forward_step_func": step.forward_step_func}
        options = _as_in_megatron(given)
        score_blend(
            self.blend,
            options["model"],
            _groups(),
            options["forward_step_func"],
            out=self.out,
            role=self.role,
            micro_batch_size=self.data.micro_batch_size,
        )
        raise _Scored


def _as_in_megatron(options: Options) -> Options:
    """Converts NeMo's arguments for its schedule to the form of Megatron's trainers.

    NeMo passes a single model chunk without a list, batches with their number in the data loader,
    and a loss function that is a module with the whole batch.
    """
    model = options["model"]
    options["model"] = model if isinstance(model, list) else [model]
    options["forward_step_func"] = _with_bound_mask(options["forward_step_func"])
    if "data_iterator" in options:
        iterators = options["data_iterator"]
        options["data_iterator"] = (
            [map(_batch, iterator) for iterator in iterators]
            if isinstance(iterators, list)
            else map(_batch, iterators)
        )
    return options


def _batch(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _with_bound_mask(forward_step: Callable) -> Callable:
    def step(batches: Iterator[Any], chunk: Any) -> tuple[Any, Callable]:
        output, loss = forward_step(batches, chunk)
        return output, partial(_loss, loss.batch.get("loss_mask"), loss)

    return step


def _loss(loss_mask: Any, loss: Callable, output: Any) -> Any:
    return loss(output)


def _groups() -> Any:
    return ProcessGroupCollection.use_mpu_process_groups()
