"""A model's losses on a range of blocks, written as references (paper, "reference caching").

Every replica appends the losses of its share to a log of its own, so that an interrupted job goes
on where it stopped, in this layout or another. Once all blocks are there one rank compacts the logs
into a dense, checked store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.megatron.scoring.distillation import TopKTargets
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceManifest, ReferenceWriter, compact, logged_ids, remove_logs
from nemo_rod.selection.references.lookup import HashedBlocks
from nemo_rod.selection.references.teacher import TeacherWriter, make_room

_BATCHES_PER_CALL = 8  # micro-batches of a replica between two writes


def is_complete(out: Path) -> bool:
    """Whether a folder has all its references; tidies up behind a run that was interrupted."""
    if not (out / "manifest.json").exists():
        return False
    if is_recorder():
        remove_logs(out)
    return True


def write_references(
    losses: MegatronScorer,
    store: HashedBlocks,
    out: Path,
    *,
    manifest: ReferenceManifest,
    name: str,
) -> None:
    """Scores the blocks that the manifest names and writes their losses; a collective call.

    Where the losses are those of `TopKTargets`, what these keep is written, too, and is on the disk
    before the log says that a block is done.

    Args:
        losses: scores blocks of the store.
        store: gives the hashes of the blocks.
        out: folder of the references.
        manifest: what the losses are computed with, and of which blocks.
        name: of the work, for the progress line.
    """
    ids = np.arange(manifest.start, manifest.stop)
    targets = losses.targets if isinstance(losses.targets, TopKTargets) else None
    if targets is not None and is_recorder():
        make_room(out, manifest, targets.vocab_size)
    missing = _agree(~np.isin(ids, logged_ids(out, manifest)) if is_recorder() else None, len(ids))
    groups = losses.groups
    # one rank of each replica: all have the same sums
    writes = all(g.rank() == g.size() - 1 for g in (groups.pp, groups.tp, groups.cp))
    writer = ReferenceWriter(out, rank=groups.dp.rank(), manifest=manifest) if writes else None
    teacher = TeacherWriter(out, manifest, targets.vocab_size) if writes and targets else None
    progress = Progress(name, len(ids), unit="blocks")
    done = len(ids) - int(missing.sum())
    progress.start(done)
    size = losses.micro_batch_size
    for part in _whole_micro_batches(missing, size, _BATCHES_PER_CALL * groups.dp.size()):
        own, sums = losses.own_part_sums(ids[part])
        kept = targets.take() if targets else None
        if writer is not None:
            assert sums is not None, "the writing rank is of the last stage"
            rows = _first_missing(own - ids[0], missing)
            hashes = store.hashes(own[rows])
            if teacher is not None and kept is not None:
                teacher.write(own[rows], kept[0][rows], kept[1][rows], hashes)
            writer.append(own[rows], sums[rows], hashes)
        if is_recorder():
            done += int(missing[np.unique(part)].sum())
            progress.step(done)
    if writer is not None:
        writer.close()
    if teacher is not None:
        teacher.close()
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


def _agree(missing: np.ndarray | None, count: int) -> np.ndarray:
    """What the recording rank finds missing, bool `[count]`, is what every rank goes by."""
    message: list[Any] = [None if missing is None else np.packbits(missing)]
    dist.broadcast_object_list(message, src=dist.get_world_size() - 1)
    return np.unpackbits(message[0], count=count).astype(bool)
