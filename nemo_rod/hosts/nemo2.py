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
from contextlib import suppress
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
    train_blend,
)
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob, Written
from nemo_rod.hosts.swap_in.roles import Roles
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.selection.competition import number

SUPPORTED = (2, 7)


def install(model: Any, data: Any, trainer: Any, **options: Any) -> Installed:
    """Makes the job of `llm.pretrain(model, data, trainer)` select its training samples.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        options: see `nemo_rod.hosts.swap_in.install`.
    """
    return _installed(_SelectingJob(trainer, **options), model, data, trainer)


def reference(model: Any, data: Any, trainer: Any, **options: Any) -> None:
    """Writes reference losses in NeMo's own `llm.pretrain`, which ends in its first step.

    Args:
        model: the job's model.
        data: the job's `llm.PreTrainingDataModule`.
        trainer: the job's `nemo.lightning.Trainer`.
        options: see `nemo_rod.hosts.swap_in.reference`.
    """
    job = HostReferenceJob(**options)
    with _installed(job, model, data, trainer):
        from nemo import lightning as nl
        from nemo.collections import llm

        checkpoint = job.model_folder(os.path.isdir)
        resume = nl.AutoResume(restore_config=nl.RestoreConfig(path=checkpoint))
        log = nl.NeMoLogger(log_dir=str(job.out), name="log", use_datetime_version=False, ckpt=None)
        with suppress(Written):
            llm.pretrain(model, data, trainer, log=log, resume=resume)


def _installed(job: Job, model: Any, data: Any, trainer: Any) -> Installed:
    """Puts a job into its trainer, once it is checked."""
    check_version()
    check_host("nemo2", *trainer.callbacks)
    refuse(model, data, trainer, job.roles)
    build, batch_size = data.build, data.global_batch_size

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
        more = job.candidates(data.num_train_samples, batch_size)
        installed.replace(data, "num_train_samples", more)
    installed.replace(trainer, "callbacks", [_Hook(job, data), *trainer.callbacks])
    return installed


class _Hook(Callback):
    """Passes the training data on to the job once NeMo has built it, and lets its steps select."""

    def __init__(self, job: Job, data: Any) -> None:
        self.job, self.data = job, data
        self.lr: float | None = None  # of the step under way
        setattr(self, INSTALLED, True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called after the data module's own `setup`."""
        if stage != "fit":
            return
        checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
        self.job.write_to(checkpoints and Path(checkpoints).parent)
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
        refuse_unsafe(get_model_config(module), trainer.strategy.ddp_config)

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
    iterators = options["data_iterator"]
    several = isinstance(iterators, list)
    options["data_iterator"] = (
        list(map(unnumbered, iterators)) if several else unnumbered(iterators)
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
    blends = data.build_kwargs
    refuse_job(
        {"": strategy.data_sampler or data.data_sampler},
        (strategy._fsdp is not None, "MegatronStrategy(fsdp=...)",
         "is not supported yet", "set fsdp=None"),
        (isinstance(trainer.limit_train_batches, int), "limit_train_batches",
         "counts the candidates of an epoch", "set limit_train_batches=1.0"),
        (trainer.max_steps < 1, f"max_steps={trainer.max_steps}",
         "must know how many samples the job draws", "set max_steps"),
        blend=train_blend(blends.get("blend"), blends.get("blend_per_split")),
        roles=roles,
    )  # fmt: skip
