"""One training run by Megatron-Bridge's own `pretrain()`, with the selector swapped in."""

from __future__ import annotations

import multiprocessing.dummy
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.dist_checkpointing.strategies import filesystem_async

from nemo_rod import loggers
from nemo_rod.config import PEAK_TFLOPS
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import read_ahead
from nemo_rod.jobs import TrainJob
from nemo_rod.megatron.base_losses import compare_base
from nemo_rod.megatron.bridge_config import (
    bridge_config,
    recompute,
    refuse_optimizer,
    shares_optimizer,
)
from nemo_rod.megatron.callbacks.recorder import Recorder
from nemo_rod.megatron.callbacks.show_metrics import Loggers
from nemo_rod.megatron.callbacks.validation import UntilConverged, Validation
from nemo_rod.megatron.gaps import save_hf
from nemo_rod.megatron.identity import header_identity, refuse_foreign_checkpoint
from nemo_rod.megatron.models import model_provider
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.megatron.scoring.forward_only import refuse_other_shapes, refuse_unsafe
from nemo_rod.megatron.scoring.low_precision import refuse_unavailable
from nemo_rod.megatron.scoring.training_losses import refuse_dropout
from nemo_rod.megatron.watch import UNWATCHED, Heartbeat
from nemo_rod.megatron.whole_checkpoints import name_the_last_whole, write_config_whole
from nemo_rod.progress import Progress
from nemo_rod.ranks import all_or_none, from_recorder, is_recorder, once_a_node
from nemo_rod.selection import CurriculumHeader, References, Selector
from nemo_rod.selection.arms import curriculum_header
from nemo_rod.selection.policies import reference_roles
from nemo_rod.signals import Stopped
from nemo_rod.terms import make_terms
from nemo_rod.upstream import changes, functions


def train(
    job: TrainJob, callbacks: Sequence[Callback] = (), heartbeat: Heartbeat = UNWATCHED
) -> None:
    """Trains one arm from its base, or resumes an interrupted run.

    Fills `job.out` with `checkpoints/`, `curriculum.rod`, `metrics.jsonl` and, at the end, `hf/`.

    Args:
        job: the training job.
        callbacks: additional Megatron-Bridge callbacks.
        heartbeat: reports this rank's progress, and the files that it begins to read.

    Raises:
        Stopped: the run was asked to stop, and has saved a checkpoint.
        ValueError: the checkpoint to resume from belongs to a different run, or the trainer's
            version is untested.
    """
    functions.check("scoring", "trainer")
    loggers.check_installed(job.loggers)
    refuse_unavailable(job.config.scoring.precision)
    refuse_optimizer(job)
    out, scoring = Path(job.out), job.config.scoring
    store = BlockStore(job.blocks, on_read=heartbeat.announce)
    references: References | None = None
    if job.references:  # made by the same pass as the job's own scores
        references = References.open(
            job.references,
            store,
            roles=reference_roles(job.arm.needs),
            length=job.arm.scored_length(store.block_size),
            precision=job.arithmetic,
            verified=False,
        )
    steps, on_nonfinite = job.config.train.steps, job.config.selection.on_nonfinite
    chooser = Selector.for_arm(job.arm, store, references, on_nonfinite, steps)  # type: ignore[arg-type]
    selector = RoDSelector(
        chooser,
        store,
        scoring_micro_batch_size=scoring.micro_batch_size,
        scoring_precision=scoring.precision,
        beat=heartbeat.beat,
    )
    header = curriculum_header(job.arm, store, references, config=job.config_digest)
    identity = header_identity(header)
    all_or_none(lambda: name_the_last_whole(out / "checkpoints") if dist.get_rank() == 0 else None)
    sharded = shares_optimizer(job)
    refuse_foreign_checkpoint(out / "checkpoints", identity, job.parallel, sharded=sharded)
    compare_base(job, job.start, heartbeat)
    bridge, provider = model_provider(
        job.start, job.parallel, job.config.model, block_size=store.block_size
    )
    recompute(provider, job.config.train.recompute)
    selector.terms = make_terms(job.config.train.terms, provider)
    exporter = _Exporter(partial(save_hf, bridge, folder=out / "hf"))
    every = [*callbacks, _SignalHandler(), *_callbacks(job, selector, header), exporter]
    config = bridge_config(job, provider, store, identity)
    write_config_whole(config)
    refuse_unsafe(provider, config.ddp)
    refuse_other_shapes(
        provider,
        scoring=scoring.micro_batch_size,
        training=job.config.train.micro_batch_size,
        is_prefix=job.arm.scored_prefix < 1,
    )
    if hasattr(chooser.policy, "estimate"):
        refuse_dropout(provider)
    if references is not None:
        # the files of all lookups once on every node, before its ranks read them at random
        once_a_node(lambda: references.verify(heartbeat.announce))
        once_a_node(lambda: read_ahead(store.hash_files, heartbeat.announce))
        drawn = partial(job.arm.candidates.drawn, steps, reference_roles(job.arm.needs))
        from_recorder(lambda: references.refuse_missing(drawn()))
    if is_recorder():
        loggers.prepare_runs(job.loggers, out)
    _pretrain(job, selector, config, every)


def _callbacks(job: TrainJob, selector: RoDSelector, header: CurriculumHeader) -> list[Callback]:
    """Returns the callbacks that measure, record and show a run, in their order of dependence."""
    out, steps = Path(job.out), job.config.train.steps
    validation = Validation(
        BlockStore(job.blocks, split="holdout"),
        out,
        every=job.config.validation.every,
        num_blocks=job.config.validation.blocks,
        micro_batch_size=job.config.scoring.micro_batch_size,
        beat=selector.beat,
    )
    tokens = job.arm.batch_size * selector.store.block_size
    progress = Progress(job.name, steps, tokens=tokens)
    peak_tflops = PEAK_TFLOPS.get(job.config.cluster.gpu or "", {}).get(job.config.model.precision)
    recorder = Recorder(out, selector, validation, header, progress, peak_tflops)
    selector.on_choice, selector.on_step = recorder.on_choice, recorder.on_step
    every: list[Callback] = [validation, recorder]
    if job.loggers:
        every.append(Loggers(recorder, validation, job.loggers, job.run_name))
    if job.convergence is not None:
        every.append(UntilConverged(job.convergence, validation, BlockStore(job.blocks), steps))
    return every


def _pretrain(
    job: TrainJob, selector: RoDSelector, config: ConfigContainer, callbacks: list[Callback]
) -> None:
    _write_checkpoints_in_this_process()
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


def _write_checkpoints_in_this_process() -> None:
    """Writes checkpoints in threads of the rank, and collects their results there.

    Megatron's queue would start a process that imports all of Megatron, and core 0.16 forks its
    writers: a fork of a process with threads may wait for ever for a lock that one of them held.
    """
    if getattr(filesystem_async, "_results_queue", "unknown") is None:
        filesystem_async._results_queue = results = queue.Queue[object]()
        vars(results)["_manager"] = SimpleNamespace(shutdown=lambda: None)  # Bridge 0.7 ends it
    if changes.writers_are_forked(filesystem_async):
        filesystem_async.mp = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)


class _SignalHandler(Callback):
    """Makes the trainer save and stop at the end of a step after a stop signal."""

    def on_train_start(self, context: CallbackContext) -> None:
        handler = context.state.signal_handler
        if not changes.signal_handler_listens(handler):
            handler.__enter__()

    def on_train_end(self, context: CallbackContext) -> None:
        context.state.signal_handler.release()


@dataclass(eq=False)
class _Exporter(Callback):
    """Writes the trained weights as a Hugging Face checkpoint."""

    save: Callable[[list], None]

    def on_train_end(self, context: CallbackContext) -> None:
        self.save(context.model)
