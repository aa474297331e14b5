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

from nemo_rod.hosts.swap_in.job import INSTALLED, Facts, Installed, Job, SelectingJob, check_host
from nemo_rod.hosts.swap_in.job_references import HostReferenceJob, Written
from nemo_rod.loggers import legal_names
from nemo_rod.megatron.save_helpers import end_with_rank
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.ranks import from_recorder


def install(model: Any, data: Any, trainer: Any, **options: Any) -> Installed:
    """Makes the job of `llm.pretrain(model, data, trainer)` select; see `swap_in.install`."""
    return _put_into_trainer(_SelectingJob(**options), model, data, trainer)


def reference(model: Any, data: Any, trainer: Any, **options: Any) -> None:
    """Writes reference losses in NeMo's own `llm.pretrain`, which ends in its first step.

    See `swap_in.reference` for the arguments.
    """
    job = HostReferenceJob(**options)
    with _put_into_trainer(job, model, data, trainer):
        from nemo import lightning as nl
        from nemo.collections import llm

        checkpoint = job.model_folder(os.path.isdir)
        resume = nl.AutoResume(restore_config=nl.RestoreConfig(path=checkpoint))
        log = nl.NeMoLogger(log_dir=str(job.out), name="log", use_datetime_version=False, ckpt=None)
        with suppress(Written):
            llm.pretrain(model, data, trainer, log=log, resume=resume)


def _put_into_trainer(job: Job, model: Any, data: Any, trainer: Any) -> Installed:
    """Puts a job into its trainer, once it is checked."""
    check_version()
    check_host("nemo2", *trainer.callbacks)
    end_with_rank()
    refuse(job, model, data, trainer)
    build, batch_size = data.build, data.global_batch_size

    def build_more(
        trainer_max_steps: int, trainer_val_check_interval: Any, *limits: Any, **named: Any
    ) -> None:
        # both are scaled by m, so that the number of validation samples, which NeMo derives from
        # their quotient, stays the same
        counts = trainer_max_steps * batch_size, trainer_val_check_interval * batch_size
        steps, interval = (-(-job.candidates(count, batch_size) // batch_size) for count in counts)
        build(steps, interval, *limits, **named)

    job.state = trainer
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
        self.job, self.data, self.batch_size = job, data, data.global_batch_size
        setattr(self, INSTALLED, True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called after the data module's own `setup`."""
        if stage != "fit":
            return
        size, steps, interval = self.batch_size, trainer.max_steps, trainer.val_check_interval
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        facts = Facts(
            batch_size=size,
            seed=self.data.seed,
            steps=steps,
            every=interval if isinstance(interval, int) else None,
            checkpoints=folder and Path(folder).parent,
        )
        valid, drawn = getattr(self.data, "_validation_ds", None), steps * size
        self.job.built(self.data._train_ds, valid, self.job.candidates(drawn, size), facts)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses unsafe precision and overlap settings, which the model only has from here on."""
        module = pl_module.module if hasattr(pl_module, "module") else pl_module
        refuse_unsafe(get_model_config(module), trainer.strategy.ddp_config)

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """Replaces the schedule in training; called before every training and validation pass."""
        if step.forward_only:
            return
        done, optimizer = step.trainer.global_step, step.trainer.optimizers[0]
        groups = ProcessGroupCollection.use_mpu_process_groups()
        schedule, consumed = step.forward_backward_func, done * self.batch_size
        select = self.job.around(schedule, optimizer, done, groups, consumed)
        # a cached property of this step only
        step.__dict__["forward_backward_func"] = partial(_as_megatron_calls, select)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        known = trainer.callback_metrics
        self.job.ended(known.get("reduced_train_loss"), known.get("grad_norm"))


def _as_megatron_calls(select: Callable, **options: Any) -> Any:
    """Calls a schedule with NeMo's arguments in the form of Megatron's trainers.

    NeMo passes a single model chunk without a list, batches with their number in the data loader,
    and a loss function that is a module with the whole batch. The batches of the step are read.
    """
    model, forward_step = options["model"], options["forward_step_func"]
    iterators, count = options["data_iterator"], options["num_microbatches"]

    def step(batches: Iterator[Any], chunk: Any) -> tuple[Any, Callable]:
        output, loss = forward_step(batches, chunk)
        mask = loss.batch.get("loss_mask")
        return output, partial(lambda bound_mask, output: loss(output), mask)

    def read(iterator: Iterator[Any]) -> Iterator[Any]:
        batches = list(islice(iterator, count))
        return iter([item[0] if isinstance(item, tuple) else item for item in batches])

    several = isinstance(iterators, list)
    options["data_iterator"] = list(map(read, iterators)) if several else read(iterators)
    options["model"] = model if isinstance(model, list) else [model]
    options["forward_step_func"] = step
    return select(**options)


class _SelectingJob(SelectingJob):
    """A job whose state is the trainer, whose loggers write on the first rank."""

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """Shows the metrics in every logger of the trainer."""
        known = from_recorder(lambda: metrics)
        for logger in self.state.loggers if self.state.is_global_zero else ():
            kind = type(logger).__name__.removesuffix("Logger").lower()
            logger.log_metrics(legal_names(known, kind), step=done)


def check_version(version: str = "") -> None:
    """Refuses, by a ValueError, another NeMo than 2.7 with its LLM collection.

    `version` is that of nemo-toolkit, by default of the installed one.
    """
    try:
        version = version or importlib.metadata.version("nemo-toolkit")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "NeMo is not installed: install nemo-toolkit 2.7 for the host 'nemo2'."
        ) from None
    release = tuple(int(part) for part in version.split(".")[:2])
    if release >= (3, 0):
        raise ValueError(
            f"nemo-toolkit {version} has no LLM collection (it ended with 2.7): move the job to "
            "Megatron-Bridge and use the host 'megatron_bridge'."
        )
    if release != (2, 7) or importlib.util.find_spec("nemo.collections.llm") is None:
        raise ValueError(
            f"nemo-toolkit {version} is not supported here: others than 2.7 pair with a "
            "megatron-core without the functions that scoring needs; install all of 2.7, "
            "nemo.collections.llm included, which pairs with 0.15."
        )


def refuse(job: Job, model: Any, data: Any, trainer: Any) -> None:
    """Refuses jobs that selection does not support; see `Job.refuse`."""
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
    blends = data.build_kwargs
    job.refuse(
        model.config,
        strategy.ddp_config,
        {"": strategy.data_sampler or data.data_sampler},
        (strategy._fsdp is not None, "MegatronStrategy(fsdp=...)",
         "is not supported yet", "set fsdp=None"),
        (isinstance(trainer.limit_train_batches, int), "limit_train_batches",
         "counts the candidates of an epoch", "set limit_train_batches=1.0"),
        (trainer.max_steps < 1, f"max_steps={trainer.max_steps}",
         "must know how many samples the job draws", "set max_steps"),
        blends=job.blends(blends.get("blend"), blends.get("blend_per_split")),
    )  # fmt: skip
