"""Jobs that build models and train none: references, held-out losses, checks and exports."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.jobs import CheckJob, EvaluateJob, ExportJob, ModelJob, ReferenceJob, arithmetic
from nemo_rod.megatron.gaps import save_hf
from nemo_rod.megatron.models import build
from nemo_rod.megatron.ranks import is_recorder, of_any_rank
from nemo_rod.megatron.reference_pass import is_complete, write_references
from nemo_rod.megatron.scoring.low_precision import refuse_unavailable
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.watch import UNWATCHED, Signs
from nemo_rod.progress import Progress
from nemo_rod.selection import block_loss
from nemo_rod.selection.references.folder import role_manifest


def reference(job: ReferenceJob, signs: Signs = UNWATCHED) -> None:
    """Writes a model's losses on all training blocks of one role (paper, "reference caching").

    Raises:
        ValueError: this machine lacks the precision of the pass.
    """
    out = Path(job.out)
    if is_complete(out):  # an earlier run was interrupted only during the hand-over
        return
    refuse_unavailable(job.scoring_precision)
    store = BlockStore(job.blocks, on_read=signs.announce)
    precision = arithmetic(job.precision, job.scoring_precision)
    manifest = role_manifest(store, job.role, model=job.model_digest, precision=precision)
    scorer = _scorer(job, job.model, store, signs, job.scoring_precision)
    write_references(scorer, out, manifest=manifest, name=job.name)


def evaluate(job: EvaluateJob, signs: Signs = UNWATCHED) -> None:
    """Writes every model's held-out loss per role and source, in nats per token."""
    store = BlockStore(job.blocks, split="holdout", on_read=signs.announce)
    ids = np.arange(len(store))
    source = store.source_index(ids)
    progress = Progress(job.name, len(job.models), unit="models")
    for number, (name, model) in enumerate(job.models.items()):
        scorer = _scorer(job, model, store, signs)
        loss = block_loss(scorer.part_sums(ids), store.block_size).astype(np.float64)
        if is_recorder():
            result: dict[str, Any] = {"loss": {}, "blocks": {}}
            for index, entry in enumerate(store.sources):
                mine = loss[source == index]
                result["loss"].setdefault(entry.role, {})[entry.name] = float(mine.mean())
                result["blocks"].setdefault(entry.role, {})[entry.name] = len(mine)
            write_json(Path(job.out) / f"{name}.json", result)
            progress.step(number + 1)
        del scorer
        gc.collect()


def check_model(job: CheckJob, signs: Signs = UNWATCHED) -> None:
    """Builds the model in its layout and writes `model.json`: what every rank has and trains.

    Raises:
        ValueError: the model does not support the layout, its checkpoint cannot be loaded, or it
            would also be trained by another loss than that of the next token (`objective`).
    """
    _, chunks = build(job, job.model, BlockStore(job.blocks).block_size)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    mine = {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }
    everyone = of_any_rank([mine])
    if is_recorder():
        write_json(Path(job.out) / "model.json", {"ranks": everyone})
    del chunks, parameters
    parallel_state.destroy_model_parallel()


def export(job: ExportJob, signs: Signs = UNWATCHED) -> None:
    """Loads the weights of a distributed checkpoint, saved in any layout, and writes `hf/`.

    Raises:
        ValueError: the model cannot be built, or the version is untested.
    """
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

    bridge, chunks = build(job, job.model, BlockStore(job.blocks).block_size)
    signs.beat()
    _load_model_weights_from_checkpoint(job.checkpoint, chunks)
    signs.beat()
    save_hf(bridge, chunks, Path(job.out) / "hf")


def _scorer(
    job: ModelJob,
    model: str,
    store: BlockStore,
    signs: Signs,
    scoring_precision: str | None = None,
) -> MegatronScorer:
    _, chunks = build(job, model, store.block_size)
    return MegatronScorer(
        chunks,
        store,
        ProcessGroupCollection.use_mpu_process_groups(),
        micro_batch_size=job.scoring_micro_batch_size,
        beat=signs.beat,
        precision=scoring_precision,
    )
