"""One training run by Megatron-Bridge's own `pretrain()`, with the selector swapped in."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.core.dist_checkpointing.strategies import filesystem_async

from nemo_rod import loggers
from nemo_rod.config import Optimisation
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_ahead
from nemo_rod.jobs import TrainJob, arithmetic
from nemo_rod.megatron.callbacks.early_end import UntilConverged
from nemo_rod.megatron.callbacks.kappa import SteeredKappa
from nemo_rod.megatron.callbacks.recorder import HasMetrics, Recorder
from nemo_rod.megatron.callbacks.show_metrics import Loggers, logger_config
from nemo_rod.megatron.callbacks.training_losses import ResumedAverages, refuse_dropout
from nemo_rod.megatron.callbacks.validation import Validation
from nemo_rod.megatron.economies import recompute, refuse_optimizer
from nemo_rod.megatron.identity import (
    ChosenBlocks,
    identity_of,
    refuse_foreign_checkpoint,
    versions,
)
from nemo_rod.megatron.models import model_provider, save_hf
from nemo_rod.megatron.ranks import is_recorder, once_a_node
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.megatron.scoring.forward_only import refuse_unsafe
from nemo_rod.megatron.scoring.low_precision import refuse_unavailable
from nemo_rod.processes.signals import Stopped
from nemo_rod.selection import CurriculumHeader, ReferenceLosses, Selector, open_references
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.convergence import Rule
from nemo_rod.selection.kappa_controller import Steering
from nemo_rod.selection.references.teacher import open_teacher
from nemo_rod.upstream import changes, functions


def train(
    job: TrainJob,
    callbacks: Sequence[Callback] = (),
    beat: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda doing: None,
) -> None:
    """Trains one arm from its base, or resumes an interrupted run.

    Fills `job.out` with `checkpoints/`, `curriculum.rod`, `metrics.jsonl` and, at the end, `hf/`.

    Args:
        job: the training job.
        callbacks: additional Megatron-Bridge callbacks.
        beat: heartbeat, called whenever this rank makes progress.
        announce: called with what this rank begins to read, and with "" when it has.

    Raises:
        Stopped: the run was asked to stop, and has saved a checkpoint.
        ValueError: the checkpoint to resume from belongs to a different run, or the trainer's
            version is untested.
    """
    functions.check("scoring", "trainer")
    loggers.check_installed(job.loggers)
    refuse_unavailable(job.scoring_precision)
    out = Path(job.out)
    store = BlockStore(job.blocks, on_read=announce)
    arm = Arm(**job.arm)
    references = _references(job, store)
    chooser = Selector.of(arm, store, references, job.on_nonfinite)  # type: ignore[arg-type]
    selector = RoDSelector(
        chooser,
        store,
        scoring_micro_batch_size=job.scoring_micro_batch_size,
        scoring_precision=job.scoring_precision,
        teacher=open_teacher(job.references, store),
        beat=beat,
    )
    header = curriculum_header(arm, store, references, config=job.config_digest)
    identity = identity_of(header)
    refuse_foreign_checkpoint(out / "checkpoints", identity)
    bridge, provider = _provider(job, store.block_size)
    validation = _validation(job)
    every = [
        *callbacks,
        _SignalHandler(),
        *_recording(job, arm, selector, validation, header),
        *_resuming(chooser, out),
        _Exporter(partial(save_hf, bridge, folder=out / "hf")),
    ]
    config = bridge_config(job, provider, store, identity)
    if job.convergence is not None:
        every.append(_until_converged(job, validation, store))
        # a checkpoint may hold an end that was moved; the metrics reproduce it
        config.scheduler.override_opt_param_scheduler = True
    _refuse_wrong_scores(provider, config, chooser)
    _read_ahead(references, store, announce)
    if is_recorder():
        loggers.prepare_runs(job.loggers, out)
    _pretrain(job, selector, config, every)


def _provider(job: TrainJob, block_size: int) -> tuple[Any, Any]:
    """Returns Megatron-Bridge's bridge and its provider of the model, as the job trains it."""
    refuse_optimizer(job.optimisation, sharded=_sharded(job))
    bridge, provider = model_provider(
        job.model,
        job.parallel,
        precision=job.precision,
        block_size=block_size,
        trust_remote_code=job.trust_remote_code,
    )
    recompute(provider, job.optimisation.recompute)
    return bridge, provider


def _pretrain(
    job: TrainJob, selector: RoDSelector, config: ConfigContainer, callbacks: list[Callback]
) -> None:
    _collect_write_results_here()
    try:
        with selector.installed():
            pretrain(config, forward_step, callbacks=callbacks)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(
                f"Megatron ended the process with exit status {end.code}: the lines above say why"
            ) from None
        raise Stopped(
            f"{job.name} was asked to stop and has saved: run it again to resume"
        ) from None  # the trainer's exit after a stop signal


def _refuse_wrong_scores(provider: Any, config: Any, chooser: Selector) -> None:
    refuse_unsafe(provider, config.ddp, splits_context=True, between_steps=True)
    if chooser.averages is not None:
        refuse_dropout(provider)


def _read_ahead(
    references: ReferenceLosses | None, store: BlockStore, announce: Callable[[str], None]
) -> None:
    """Reads the files of all lookups once on every node, before its ranks do at random."""
    if references is not None:
        files = [*references.files, *store.hash_files]
        once_a_node(lambda: read_ahead(files, announce))


def _references(job: TrainJob, store: BlockStore) -> ReferenceLosses | None:
    """Opens references that were made by the same pass as the job's own scores."""
    if not job.references:
        return None
    precision = arithmetic(job.precision, job.scoring_precision)
    return open_references(job.references, store, distilled=True, precision=precision)


def _validation(job: TrainJob) -> Validation:
    return Validation(
        BlockStore(job.blocks, split="holdout"),
        Path(job.out),
        every=job.validation_every,
        num_blocks=job.validation_blocks,
        micro_batch_size=job.scoring_micro_batch_size,
    )


def _until_converged(job: TrainJob, validation: Validation, store: BlockStore) -> UntilConverged:
    assert job.convergence is not None
    rule, metrics = Rule(**job.convergence), Path(job.out) / "metrics.jsonl"
    return UntilConverged(rule, validation, store, metrics, steps=job.optimisation.steps)


def _recording(
    job: TrainJob,
    arm: Arm,
    selector: RoDSelector,
    validation: Validation,
    header: CurriculumHeader,
) -> list[Callback]:
    """Validation, the run's record, the loggers and what steers kappa, if so; in this order."""
    out, steps = Path(job.out), job.optimisation.steps
    steered = []
    if arm.steering is not None:
        steered.append(SteeredKappa(Steering(**arm.steering), selector, validation, out))
    measured: list[HasMetrics] = [validation, *steered]
    recorder = Recorder(out, selector, measured, header=header, steps=steps, name=job.name)
    selector.on_choice = recorder.on_choice
    shown = [Loggers(recorder, validation, out)] if job.loggers else []
    return [validation, recorder, *shown, *steered]


def bridge_config(
    job: TrainJob, provider: Any, store: BlockStore, identity: dict[str, Any]
) -> ConfigContainer:
    """Translates a job into Megatron-Bridge's configuration; weights are saved with `identity`."""
    o = job.optimisation
    on_gpu, sharded = torch.cuda.is_available(), _sharded(job)
    checkpoints = str(Path(job.out) / "checkpoints")
    return ConfigContainer(
        model=provider,
        train=TrainingConfig(
            train_iters=o.steps,
            global_batch_size=o.batch_size,
            micro_batch_size=o.micro_batch_size,
            eval_iters=0,
            eval_interval=o.steps,
            exit_signal_handler=True,
        ),
        optimizer=_optimizer(job, provider.params_dtype, sharded),
        scheduler=_scheduler(o),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=o.grad_reduce == "fp32",
            check_for_nan_in_grad=True,
            overlap_grad_reduce=on_gpu or sharded,
            overlap_param_gather=sharded,
            use_distributed_optimizer=sharded,
        ),
        dataset=ChosenBlocks(
            seq_length=store.block_size,
            identity=identity,
            versions=versions(),
            dataloader_type="external",
            num_workers=0,
            pin_memory=on_gpu,
        ),
        logger=logger_config(job),
        # the selector reads the tokens; the trainer only needs the vocabulary size
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=provider.vocab_size - 1
        ),
        checkpoint=CheckpointConfig(
            save=checkpoints,
            load=checkpoints,
            save_interval=job.checkpoint_every,
            most_recent_k=job.checkpoint_keep,
            ckpt_format="torch_dist",
            async_save=False,
        ),
        dist=DistributedInitConfig(
            distributed_backend=dist.get_backend(),
            distributed_timeout_minutes=job.collective_minutes,
        ),
        rng=RNGConfig(seed=job.seed),
    )


def _sharded(job: TrainJob) -> bool:
    """Returns whether replicas share the optimizer's state."""
    sharded = job.parallel.distributed_optimizer
    return torch.cuda.is_available() if sharded is None else sharded


def _resuming(selector: Selector, out: Path) -> list[Callback]:
    """What brings the estimates of a resumed run up to date, where there are any."""
    if selector.averages is None or selector.references is None:
        return []
    return [ResumedAverages(selector.averages, selector.references, out)]


def _optimizer(job: TrainJob, dtype: torch.dtype, sharded: bool) -> OptimizerConfig:
    o = job.optimisation
    # gradients reduced in bf16 need no copy in fp32 for an update that can read them
    narrow = o.precision_aware_optimizer and o.grad_reduce == "bf16" and job.precision == "bf16"
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.lr * o.min_lr_ratio,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
        bf16=job.precision == "bf16",
        fp16=False,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
        use_precision_aware_optimizer=o.precision_aware_optimizer,
        main_grads_dtype=torch.bfloat16 if narrow else torch.float32,
        optimizer_cpu_offload=o.optimizer_offload,
        optimizer_offload_fraction=1.0 if o.optimizer_offload else 0.0,
    )


def _scheduler(o: Optimisation) -> SchedulerConfig:
    """Warm-up, stable, decay."""
    return SchedulerConfig(
        lr_decay_style="WSD",
        lr_wsd_decay_style="cosine",
        lr_warmup_iters=o.warmup,
        lr_decay_iters=o.steps,
        lr_wsd_decay_iters=o.decay,  # by default, Bridge's decay spans the whole run
        start_weight_decay=o.weight_decay,
        end_weight_decay=o.weight_decay,
        weight_decay_incr_style="constant",
    )


def _collect_write_results_here() -> None:
    """Saves each rank a process that would import all of Megatron at the first checkpoint.

    Megatron's queue of write results connects processes, as `async_save` requires. Here the rank
    itself writes.
    """
    if getattr(filesystem_async, "_results_queue", "unknown") is None:
        filesystem_async._results_queue = queue.Queue()


class _SignalHandler(Callback):
    """Makes the trainer save and stop at the end of a step after a stop signal."""

    def on_train_start(self, context: CallbackContext) -> None:
        handler = context.state.signal_handler
        if not changes.signal_handler_listens(handler):
            handler.__enter__()

    def on_train_end(self, context: CallbackContext) -> None:
        context.state.signal_handler.release()


class _Exporter(Callback):
    """Writes the trained weights as a Hugging Face checkpoint."""

    def __init__(self, save: Any) -> None:
        self.save = save

    def on_train_end(self, context: CallbackContext) -> None:
        self.save(context.model)
