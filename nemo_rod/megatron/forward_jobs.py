"""Jobs that do not train: references, held-out losses, checks and exports."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json, writing
from nemo_rod.jobs import EvaluateJob, ExportJob, ModelJob, ReferenceJob
from nemo_rod.megatron.base_losses import compare_base
from nemo_rod.megatron.gaps import save_hf
from nemo_rod.megatron.models import build
from nemo_rod.megatron.scoring.low_precision import refuse_unavailable
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.watch import UNWATCHED, Heartbeat
from nemo_rod.progress import Progress
from nemo_rod.ranks import from_recorder, is_recorder
from nemo_rod.selection.references.folder import holds, role_manifest
from nemo_rod.selection.references.reference_pass import write_references


def reference(job: ReferenceJob, heartbeat: Heartbeat = UNWATCHED) -> None:
    """Writes a model's losses on training blocks of one role (paper, "reference caching").

    Raises:
        ValueError: this machine lacks the precision of the pass.
    """
    refuse_unavailable(job.config.scoring.precision)
    store = BlockStore(job.blocks, on_read=heartbeat.announce)
    manifest = role_manifest(
        store, job.role, model=job.model_digest, lengths=job.lengths, precision=job.arithmetic
    )
    required = np.load(job.wanted)[manifest.start : manifest.stop] if job.wanted else None
    if holds(Path(job.out), manifest, required):
        return  # an earlier run was interrupted only during the hand-over
    if job.role == "replay":  # scored by the base
        compare_base(job, job.start, heartbeat)
    scorer = _scorer(job, job.start, store, heartbeat, job.config.scoring.precision)
    write_references(
        scorer,
        Path(job.out),
        manifest=manifest,
        name=job.name,
        agree=from_recorder,
        required=required,
    )


def evaluate(job: EvaluateJob, heartbeat: Heartbeat = UNWATCHED) -> None:
    """Writes every model's held-out losses per role and source, and per block, in nats a token."""
    store = BlockStore(job.blocks, split="holdout", on_read=heartbeat.announce)
    ids = np.arange(len(store))
    source = store.source_index(ids)
    progress = Progress(job.name, len(job.models), unit="models")
    if "base" in job.models:
        compare_base(job, job.models["base"], heartbeat)
    for number, (name, model) in enumerate(job.models.items()):
        scorer = _scorer(job, model, store, heartbeat)
        loss = scorer.losses(ids).astype(np.float64)
        if is_recorder():
            result: dict[str, Any] = {"loss": {}, "blocks": {}}
            for index, entry in enumerate(store.sources):
                mean = float(loss[source == index].mean())
                result["loss"].setdefault(entry.role, {})[entry.name] = mean
                result["blocks"].setdefault(entry.role, {})[entry.name] = entry.count
            with writing(file := Path(job.out) / f"{name}.npy"):
                np.save(file, loss.astype(np.float32))
            write_json(Path(job.out) / f"{name}.json", result)
            progress.step(number + 1)
        del scorer
        gc.collect()


def export(job: ExportJob, heartbeat: Heartbeat = UNWATCHED) -> None:
    """Loads the weights of a distributed checkpoint, saved in any layout, and writes `hf/`.

    Raises:
        ValueError: the model cannot be built, or the version is untested.
    """
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

    size, terms = BlockStore(job.blocks).block_size, job.config.train.terms
    bridge, chunks = build(job, job.start, size, terms)
    heartbeat.beat()
    _load_model_weights_from_checkpoint(job.saved, chunks)
    heartbeat.beat()
    save_hf(bridge, chunks, Path(job.out) / "hf")


def _scorer(
    job: ModelJob, model: str, store: BlockStore, heartbeat: Heartbeat, precision: str | None = None
) -> MegatronScorer:
    _, chunks = build(job, model, store.block_size)
    return MegatronScorer(
        chunks,
        store,
        ProcessGroupCollection.use_mpu_process_groups(),
        micro_batch_size=job.config.scoring.micro_batch_size,
        beat=heartbeat.beat,
        precision=precision,
    )
