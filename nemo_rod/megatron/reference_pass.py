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
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.progress import Progress
from nemo_rod.selection import ReferenceManifest, ReferenceWriter, compact, logged_ids, remove_logs
from nemo_rod.selection.arrays import Mask

_BATCHES_PER_CALL = 8  # micro-batches per replica between two writes


def is_complete(out: Path) -> bool:
    """Returns whether a folder holds all its references; if so, removes leftover logs."""
    if not (out / "manifest.json").exists():
        return False
    if is_recorder():
        remove_logs(out)
    return True


def write_references(
    scorer: MegatronScorer, out: Path, *, manifest: ReferenceManifest, name: str
) -> None:
    """Scores the blocks that the manifest names and writes their losses. Collective.

    Args:
        scorer: the scorer, whose store has the blocks.
        out: folder of the references.
        manifest: the range of blocks and how their losses are computed.
        name: title of the progress line.
    """
    ids = np.arange(manifest.start, manifest.stop)
    packed = from_recorder(lambda: np.packbits(~np.isin(ids, logged_ids(out, manifest))))
    missing = np.unpackbits(packed, count=len(ids)).astype(bool)
    groups = scorer.groups
    # one rank per replica writes, as all have the same losses
    writes = all(g.rank() == g.size() - 1 for g in (groups.pp, groups.tp, groups.cp))
    writer = ReferenceWriter(out, rank=groups.dp.rank(), manifest=manifest) if writes else None
    progress = Progress(name, len(ids), unit="blocks")
    done = len(ids) - int(missing.sum())
    progress.start(done)
    size = scorer.micro_batch_size
    for part in whole_micro_batches(missing, size, groups.dp.size()):
        rows, own_losses = scorer.own_losses_at(ids[part], manifest.lengths)
        if writer is not None:
            assert own_losses is not None, "the writing rank is of the last stage"
            own = rows_to_write(part, missing, rows)
            own_ids = ids[part[rows[own]]]
            # a sample without targets is never chosen
            found = np.where(np.isneginf(own_losses), np.float32(0), own_losses)
            writer.append(own_ids, found[own], scorer.store.hashes(own_ids))
        if is_recorder():
            done += int(missing[np.unique(part)].sum())
            progress.step(done)
    if writer is not None:
        writer.close()
    dist.barrier()
    if is_recorder():
        compact(out, manifest=manifest, hashes=scorer.store.hashes)


def whole_micro_batches(missing: Mask, size: int, replicas: int) -> Iterator[np.ndarray]:
    """Yields the positions of incomplete micro-batches, some for every replica at a time.

    Position p always lies in micro-batch p // size. A block is therefore scored with the same
    others after any interruption and with any number of replicas: its loss is bit-identical even
    where neighbours matter in the last bits, as with FP8 or experts. The last micro-batch is padded
    with repeats of the last block, and the last group with repeats of micro-batches, so that all
    replicas have equally many.

    Args:
        missing: positions that are still to be scored.
        size: blocks in a micro-batch.
        replicas: data-parallel size.
    """
    incomplete = np.flatnonzero(np.logical_or.reduceat(missing, np.arange(0, len(missing), size)))
    count = _BATCHES_PER_CALL * replicas
    for start in range(0, len(incomplete), count):
        group = incomplete[start : start + count]
        group = np.resize(group, -(-len(group) // replicas) * replicas)
        positions = group[:, None] * size + np.arange(size)
        yield np.minimum(positions.ravel(), len(missing) - 1)


def rows_to_write(part: np.ndarray, missing: Mask, rows: np.ndarray) -> np.ndarray:
    """Returns which of a replica's rows it writes: over all replicas, each missing position once.

    Args:
        part: positions scored by all replicas, int64 `[P]`.
        missing: positions that are still to be scored.
        rows: the replica's rows of `part`, int64 `[c]`.

    Returns:
        Indices into `rows`.
    """
    first = np.unique(part, return_index=True)[1]
    return np.flatnonzero(missing[part[rows]] & np.isin(rows, first))
