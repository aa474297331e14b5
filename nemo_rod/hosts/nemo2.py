"""The host NeMo 2.x: swaps the selector into `llm.pretrain(model, data, trainer, ...)`.

    on_megatron_microbatches_start    NeMo's own hook: the schedule of a training step selects first
    data.build                        requests m times the training samples

A callback does the work; of the job's objects, only one function of its data module is wrapped.
The trainer's loop counts batches as they are read, so every step also takes its own ones, unused.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from nemo_rod.hosts.swap_in.job import (
    INSTALLED,
    Installed,
    Job,
    SelectingJob,
    check_host,
    learning_rate,
    refuse_job,
)
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.selection.curriculum.journal import number

SUPPORTED = (2, 7)


def install(model: Any, data: Any, trainer: Any, **options: Any) -> Installed:
    """Makes the job of `llm.pretrain(model, data, trainer)` select its training samples.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    check_version()
    check_host("nemo2", *trainer.callbacks)
    job = _SelectingJob(trainer, **options)
    refuse(model, data, trainer, job.roles)
    return _installed(_Selection(job, data), trainer)


def reference(model: Any, data: Any, trainer: Any, **options: Any) -> None:
    """Writes reference losses in NeMo's own `llm.pretrain`, which ends before its first step.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    from nemo import lightning as nl
    from nemo.collections import llm

    check_version()
    check_host("nemo2", *trainer.callbacks)
    job = HostReferenceJob(**options)
    refuse(model, data, trainer, job.roles)
    checkpoint = job.model_folder(os.path.isdir)
    resume = nl.AutoResume(restore_config=nl.RestoreConfig(path=checkpoint))
    log = nl.NeMoLogger(log_dir=str(job.out), name="log", use_datetime_version=False, ckpt=None)
    with _installed(_Scoring(job, data), trainer):
        try:
            llm.pretrain(model, data, trainer, log=log, resume=resume)
        except _Scored:
            return


def _installed(callback: _WithData, trainer: Any) -> Installed:
    data, job = callback.data, callback.job
    build = data.build
    batch_size = data.global_batch_size

    def build_more(
        trainer_max_steps: int, trainer_val_check_interval: Any, *limits: Any, **named: Any
    ) -> None:
        # both are scaled by m, so that the number of validation samples, which NeMo derives from
        # their quotient, stays the same
        counts = trainer_max_steps * batch_size, trainer_val_check_interval * batch_size
        steps, interval = (-(-job.candidates(count, batch_size) // batch_size) for count in counts)
        build(steps, interval, *limits, **named)

    installed = Installed()
    installed.replace(data, "build", build_more)
    if data.num_train_samples is not None:
        installed.replace(
            data, "num_train_samples", job.candidates(data.num_train_samples, batch_size)
        )
    installed.replace(trainer, "callbacks", [callback, *trainer.callbacks])
    return installed


class _WithData(Callback):
    """Callback that passes the training data on to the job once NeMo has built it."""

    def __init__(self, job: Job, data: Any) -> None:
        self.job, self.data = job, data
        setattr(self, INSTALLED, True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called after the data module's own `setup`."""
        if stage == "fit":
            batch_size, interval = self.data.global_batch_size, trainer.val_check_interval
            self.job.built(
                self.data._train_ds,
                getattr(self.data, "_validation_ds", None),
                num_drawn=self.job.candidates(trainer.max_steps * batch_size, batch_size),
                batch_size=batch_size,
                seed=self.data.seed,
                steps=trainer.max_steps,
                every=interval if isinstance(interval, int) else None,
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses unsafe precision and overlap settings, which the model only has from here on."""
        module = pl_module.module if hasattr(pl_module, "module") else pl_module
        ddp_config = trainer.strategy.ddp_config
        refuse_unsafe(get_model_config(module), ddp_config)


class _Selection(_WithData):
    """Makes a job's training steps select."""

    job: SelectingJob
    lr: float | None = None  # of the step under way

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
        if stage == "fit" and self.job.out is None and checkpoints:
            self.job.out = Path(checkpoints).parent / "rod"
        super().setup(trainer, pl_module, stage)

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """Replaces the schedule in training; called before every training and validation pass."""
        if step.forward_only:
            return
        done = step.trainer.global_step
        self.lr = learning_rate(step.trainer.optimizers[0])
        select = self.job.around(
            step.forward_backward_func,
            step=done,
            groups=ProcessGroupCollection.use_mpu_process_groups(),
            consumed=done * self.data.global_batch_size,
        )

        def read_and_select(**call: Any) -> Any:
            options = _as_in_megatron(call)
            iterators = options["data_iterator"]
            count, several = options["num_microbatches"], isinstance(iterators, list)
            read = [list(islice(own, count)) for own in (iterators if several else [iterators])]
            options["data_iterator"] = [iter(own) for own in read] if several else iter(read[0])
            return select(**options)

        # a cached property of this step only
        step.__dict__["forward_backward_func"] = read_and_select

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        names = {"train/loss": "reduced_train_loss", "train/grad_norm": "grad_norm"}
        known = {name: number(trainer.callback_metrics.get(key)) for name, key in names.items()}
        self.job.ended(known | {"train/lr": self.lr})


class _SelectingJob(SelectingJob):
    """A job whose metrics go to Lightning's loggers, which write on the first rank."""

    logs_elsewhere = True

    def __init__(self, trainer: Any, **options: Any) -> None:
        super().__init__(**options)
        self.trainer = trainer

    def is_logging(self) -> bool:
        """Returns whether this is the first rank."""
        return bool(self.trainer.is_global_zero)

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in every logger of the trainer."""
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=done)


class _Scored(Exception):
    """Raised when all samples have their loss, to end the job."""


class _Scoring(_WithData):
    """Writes reference losses in place of the first training step."""

    job: HostReferenceJob

    def on_megatron_microbatches_start(self, step: Any) -> None:
        if step.forward_only:
            return
        call = {"model": step.model, "forward_step_func": step.forward_step_func}
        options = _as_in_megatron(call)
        self.job.write(
            options["model"],
            ProcessGroupCollection.use_mpu_process_groups(),
            options["forward_step_func"],
            micro_batch_size=self.data.micro_batch_size,
        )
        raise _Scored


def _as_in_megatron(options: dict[str, Any]) -> dict[str, Any]:
    """Converts NeMo's arguments for its schedule to the form of Megatron's trainers.

    NeMo passes a single model chunk without a list, batches with their number in the data loader,
    and a loss function that is a module with the whole batch.
    """
    model, forward_step = options["model"], options["forward_step_func"]

    def step(batches: Iterator[Any], chunk: Any) -> tuple[Any, Callable]:
        output, loss = forward_step(batches, chunk)
        mask = loss.batch.get("loss_mask")
        return output, partial(lambda bound_mask, output: loss(output), mask)

    def unnumbered(iterator: Iterator[Any]) -> Iterator[Any]:
        return (item[0] if isinstance(item, tuple) else item for item in iterator)

    options["model"] = model if isinstance(model, list) else [model]
    options["forward_step_func"] = step
    if "data_iterator" in options:
        iterators = options["data_iterator"]
        options["data_iterator"] = (
            list(map(unnumbered, iterators))
            if isinstance(iterators, list)
            else unnumbered(iterators)
        )
    return options


def check_version() -> None:
    """Refuses a NeMo without an LLM collection of the tested form.

    Raises:
        ValueError: NeMo is missing or not supported; the message names the version to use.
    """
    try:
        version = importlib.metadata.version("nemo-toolkit")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "NeMo is not installed: install nemo-toolkit 2.7 for the host 'nemo2'."
        ) from None
    refuse_version(version)
    if importlib.util.find_spec("nemo.collections.llm") is None:
        raise ValueError(
            f"nemo-toolkit {version} has no nemo.collections.llm here: install all of 2.7."
        )


def refuse_version(version: str) -> None:
    """Refuses, by a ValueError, versions of nemo-toolkit that the selector does not support."""
    number = tuple(int(part) for part in version.split(".")[:2])
    if number >= (3, 0):
        raise ValueError(
            f"nemo-toolkit {version} has no LLM collection (it ended with 2.7): move the job to "
            "Megatron-Bridge and use the host 'megatron_bridge'."
        )
    if number != SUPPORTED:
        raise ValueError(
            f"nemo-toolkit {version} is not supported: it pairs with a megatron-core without the "
            "functions that scoring needs; install 2.7, which pairs with 0.15."
        )


def refuse(model: Any, data: Any, trainer: Any, roles: Roles) -> None:
    """Refuses jobs that selection does not support, before anything starts.

    Raises:
        ValueError: the job is not supported; the message names the setting, the reason and the
            cure.
    """
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
    from nemo.lightning.pytorch.strategies import MegatronStrategy

    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise ValueError(
            f"The trainer's strategy is {type(strategy).__name__}: expected nl.MegatronStrategy."
        )
    if not isinstance(data, PreTrainingDataModule):
        raise ValueError(
            f"The job's data is {type(data).__name__}: expected llm.PreTrainingDataModule, which "
            "reads .bin and .idx files."
        )
    refuse_unsafe(model.config, strategy.ddp_config)
    sampler = strategy.data_sampler or data.data_sampler
    blend = data.build_kwargs.get("blend") or data.build_kwargs["blend_per_split"][0]
    features = (
        (strategy._fsdp is not None, "MegatronStrategy(fsdp=...)",
         "is not supported yet", "set fsdp=None"),
        (sampler.dataloader_type == "cyclic", "dataloader_type='cyclic'",
         "reads in an order of its own", "set dataloader_type='single'"),
        (sampler.rampup_batch_size is not None, "rampup_batch_size",
         "changes the size of the pools", "set rampup_batch_size=None"),
        (sampler.dataloader_type == "batch", "dataloader_type='batch'",
         "makes samples of many lengths", "set dataloader_type='single'"),
        (isinstance(trainer.limit_train_batches, int), "limit_train_batches",
         "counts the candidates of an epoch", "set limit_train_batches=1.0"),
        (trainer.max_steps < 1, f"max_steps={trainer.max_steps}",
         "must know how many samples the job draws", "set max_steps"),
    )  # fmt: skip
    refuse_job(
        features,
        sample_length=data.seq_length,
        length_key="seq_length=",
        prefixes=blend[0],
        roles=roles,
    )
