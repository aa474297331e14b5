"""Forward-only jobs: reference losses over a corpus, and held-out losses of many models."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import EvaluateJob, ModelJob, ScoreJob
from nemo_rod.megatron.losses import BlockLosses
from nemo_rod.megatron.models import model_provider
from nemo_rod.megatron.recorder import is_recorder
from nemo_rod.progress import Progress
from nemo_rod.selection import (
    ReferenceManifest,
    ReferenceWriter,
    block_loss,
    compact,
    logged_ids,
    remove_logs,
)

_BATCHES_PER_CALL = 8  # micro-batches of a replica between two writes


def score(job: ScoreJob, beat: Callable[[], None] = lambda: None) -> None:
    """Writes a model's losses on all training blocks of one role (paper, "reference caching").

    Every replica appends the losses of its share to a log of its own, so that an interrupted job
    goes on where it stopped, in this layout or another. Once all blocks are there one rank compacts
    the logs into a dense, checked store.
    """
    out = Path(job.out)
    if (out / "manifest.json").exists():  # complete; only the hand-over was interrupted
        if is_recorder():
            remove_logs(out)
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
    missing = _agree(~np.isin(ids, logged_ids(out, manifest)) if is_recorder() else None, len(ids))
    groups = losses.groups
    writes = groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == groups.tp.size() - 1
    writer = ReferenceWriter(out, rank=groups.dp.rank(), manifest=manifest) if writes else None
    progress = Progress(job.name, len(ids), unit="blocks")
    done = len(ids) - int(missing.sum())
    progress.start(done)
    size = job.scoring_micro_batch_size
    for part in _whole_micro_batches(missing, size, _BATCHES_PER_CALL * groups.dp.size()):
        own, sums = losses.own_chunk_sums(ids[part])
        if writer is not None:
            rows = _first_missing(own - ids[0], missing)
            writer.append(own[rows], sums[rows], store.hashes(own[rows]))  # type: ignore[index]
        if is_recorder():
            done += int(missing[np.unique(part)].sum())
            progress.step(done)
    if writer is not None:
        writer.close()
    dist.barrier()
    if is_recorder():
        compact(out, manifest=manifest, hashes=store.hashes)


def _whole_micro_batches(missing: np.ndarray, size: int, count: int) -> Iterator[np.ndarray]:
    """Positions to score, `count` micro-batches at a time: those with a block that is missing.

    Position p always lies in micro-batch p // size. So a block is scored with the same others
    whatever was interrupted and however many replicas share the work, and its loss comes out the
    same to the bit. The last micro-batch is filled up with repeats of the last block.

    Args:
        missing: bool `[n]`.
        size: blocks of a micro-batch.
        count: micro-batches in a part.

    Yields:
        int64 `[size * count]`, or fewer at the end.
    """
    begun = np.flatnonzero(np.logical_or.reduceat(missing, np.arange(0, len(missing), size)))
    for start in range(0, len(begun), count):
        positions = begun[start : start + count, None] * size + np.arange(size)
        yield np.minimum(positions.ravel(), len(missing) - 1)


def _first_missing(positions: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Rows of positions int64 `[c]` that nobody has written yet, without the repeats."""
    wanted, rows = np.unique(positions, return_index=True)
    return rows[missing[wanted]]


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
    _, provider = model_provider(
        model, job.parallel, precision=job.precision, block_size=store.block_size
    )
    provider.finalize()
    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=job.seed)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return BlockLosses(
        chunks, store, groups, micro_batch_size=job.scoring_micro_batch_size, beat=beat
    )


def _agree(missing: np.ndarray | None, count: int) -> np.ndarray:
    """What the recording rank finds missing, bool `[count]`, is what every rank goes by."""
    message: list[Any] = [None if missing is None else np.packbits(missing)]
    dist.broadcast_object_list(message, src=dist.get_world_size() - 1)
    return np.unpackbits(message[0], count=count).astype(bool)
