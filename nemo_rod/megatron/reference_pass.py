"""Writes a model's losses on a range of blocks as references (paper, "reference caching").

Every replica appends the losses of its share to its own log, so that an interrupted job resumes
where it stopped, in this layout or another. Once all blocks are logged, one rank compacts the logs
into a dense, checked store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from nemo_rod.megatron.ranks import from_recorder, is_recorder
from nemo_rod.megatron.scoring.distillation import TopKTargets
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceManifest, ReferenceWriter, compact, logged_ids, remove_logs
from nemo_rod.selection.references.teacher import TeacherWriter, make_room

_BATCHES_PER_CALL = 8  # micro-batches per replica between two writes


def is_complete(out: Path) -> bool:
    """Returns whether a folder holds all its references; if so, removes leftover logs."""
    if not (out / "manifest.json").exists():
        return False
    if is_recorder():
        remove_logs(out)
    return True


def write_references(
    losses: MegatronScorer, out: Path, *, manifest: ReferenceManifest, name: str
) -> None:
    """Scores the blocks that the manifest names and writes their losses. Collective.

    If the scorer has `TopKTargets`, their predictions are written as well, and reach the disk
    before the log marks a block as done.

    Args:
        losses: the scorer, whose store has the blocks.
        out: folder of the references.
        manifest: the range of blocks and how their losses are computed.
        name: title of the progress line.
    """
    ids = np.arange(manifest.start, manifest.stop)
    targets = losses.targets if isinstance(losses.targets, TopKTargets) else None
    if targets is not None and is_recorder():
        make_room(out, manifest, targets.vocab_size)
    packed = from_recorder(lambda: np.packbits(~np.isin(ids, logged_ids(out, manifest))))
    missing = np.unpackbits(packed, count=len(ids)).astype(bool)
    groups = losses.groups
    # one rank per replica writes, as all have the same sums
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
            wanted, rows = np.unique(own - ids[0], return_index=True)  # without repeats
            rows = rows[missing[wanted]]
            hashes = losses.store.hashes(own[rows])
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
        compact(out, manifest=manifest, hashes=losses.store.hashes)


def _whole_micro_batches(missing: np.ndarray, size: int, count: int) -> Iterator[np.ndarray]:
    """Yields the positions of incomplete micro-batches, `count` micro-batches at a time.

    Position p always lies in micro-batch p // size. A block is therefore scored with the same
    others after any interruption and with any number of replicas, and its loss is bit-identical.
    The last micro-batch is padded with repeats of the last block.
    """
    begun = np.flatnonzero(np.logical_or.reduceat(missing, np.arange(0, len(missing), size)))
    for start in range(0, len(begun), count):
        positions = begun[start : start + count, None] * size + np.arange(size)
        yield np.minimum(positions.ravel(), len(missing) - 1)
