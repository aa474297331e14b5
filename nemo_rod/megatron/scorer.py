"""Forward-only jobs: reference losses over a corpus, and held-out losses of many models."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import EvaluateJob, ModelJob, ScoreJob
from nemo_rod.megatron.losses import BlockLosses
from nemo_rod.megatron.models import model_provider
from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.megatron.reference_pass import is_complete, write_references
from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceManifest, block_loss


def score(job: ScoreJob, beat: Callable[[], None] = lambda: None) -> None:
    """Writes a model's losses on all training blocks of one role (paper, "reference caching")."""
    out = Path(job.out)
    if is_complete(out):  # only the hand-over was interrupted
        return
    store = BlockStore(job.blocks)
    ids = role_ids(store, job.role)
    if len(ids) == 0:
        raise ValueError(f"{job.blocks} has no {job.role} block: add such a source and prepare it.")
    losses = _scorer(job, job.model, store, beat)
    manifest = ReferenceManifest(
        model=job.model_digest,
        tokenizer=store.tokenizer_fingerprint,
        store=store.digest,
        block_size=store.block_size,
        start=int(ids[0]),
        stop=int(ids[-1]) + 1,
        precision=job.precision,
    )
    write_references(losses, store, out, manifest=manifest, name=job.name)


def evaluate(job: EvaluateJob, beat: Callable[[], None] = lambda: None) -> None:
    """Writes every model's held-out loss per role and source, in nats per token."""
    store = BlockStore(job.blocks, split="holdout")
    ids = np.arange(len(store))
    source = store.source_index(ids)
    progress = Progress(job.name, len(job.models), unit="models")
    for number, (name, model) in enumerate(job.models.items()):
        losses = _scorer(job, model, store, beat)
        loss = block_loss(losses.chunk_sums(ids), store.block_size).astype(np.float64)
        if is_recorder():
            result: dict[str, Any] = {"loss": {}, "blocks": {}}
            for index, entry in enumerate(store.sources):
                mine = loss[source == index]
                result["loss"].setdefault(entry.role, {})[entry.name] = float(mine.mean())
                result["blocks"].setdefault(entry.role, {})[entry.name] = len(mine)
            (Path(job.out) / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
            progress.step(number + 1)
        del losses
        gc.collect()


def role_ids(store: BlockStore, role: str) -> np.ndarray:
    """Ids of all blocks of a role, int64 `[n]`; they are contiguous."""
    if role == "adaptation":
        return np.arange(store.num_adaptation)
    return np.arange(store.num_adaptation, len(store))


def _scorer(job: ModelJob, model: str, store: BlockStore, beat: Callable[[], None]) -> BlockLosses:
    parallel = job.parallel
    _, provider = model_provider(
        model,
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        precision=job.precision,
        block_size=store.block_size,
    )
    provider.finalize()
    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=job.seed)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return BlockLosses(
        chunks, store, groups, micro_batch_size=job.scoring_micro_batch_size, beat=beat
    )
