"""The assignment of chosen blocks to replicas, and of blocks to scoring passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.references import ReferenceManifest

_BATCHES_PER_CALL = 8  # micro-batches of a replica in one call for reference losses


def deal(chosen_K: Ids, *, micro_batch_size: int, replicas: int) -> list[Ids]:
    """Deals the chosen blocks out to the replicas by whole micro-batches.

    Micro-batches do not depend on the number of replicas: some losses, such as a router's balancing
    loss, are computed over a micro-batch.

    Args:
        chosen_K: block ids, or positions, int64 [K]; K a multiple of `micro_batch_size * replicas`.
        micro_batch_size: blocks in one forward-backward pass of one replica.
        replicas: data-parallel size.

    Returns:
        Block ids or positions, int64 [K / replicas], for every replica.
    """
    by_micro_batch = chosen_K.reshape(-1, micro_batch_size)
    return [by_micro_batch[replica::replicas].ravel() for replica in range(replicas)]


def scoring_passes(
    num_blocks: int,
    *,
    micro_batch_size: int,
    replicas: int,
    pipeline: int = 1,
    chunks: int = 1,
    prefix: float = 1.0,
) -> tuple[int, int]:
    """Splits blocks into forward passes.

    The blocks of a replica are spread evenly over its passes: rounded up to whole micro-batches,
    2048 blocks on 1000 replicas in fours would be 4 blocks on each, where 3 suffice. A pass of
    prefixes has more of them, up to the same number of tokens, unless there is a pipeline, which
    needs many micro-batches rather than large ones. Its interleaved schedule needs a multiple of
    the number of its stages.

    Args:
        num_blocks: blocks to score, over all replicas.
        micro_batch_size: whole blocks in one forward pass of one replica.
        replicas: data-parallel size.
        pipeline: pipeline stages.
        chunks: model chunks of a stage.
        prefix: scored prefix of every block.

    Returns:
        Blocks in one pass of one replica, and passes of each replica. Together they may exceed
        `num_blocks`; the excess is padding.
    """
    per_replica, size = -(-num_blocks // replicas), micro_batch_size
    if pipeline == 1:
        size = int(size / prefix)
    if passes := -(-per_replica // size):
        size = -(-per_replica // passes)
    unit = pipeline if chunks > 1 else 1
    return size, unit * -(-per_replica // (size * unit))


def scored_blocks(
    missing: Ids,
    manifest: ReferenceManifest,
    losses_at: Callable[[Ids, tuple[int, ...]], Nats],
    *,
    micro_batch_size: int,
    replicas: int,
) -> Iterator[tuple[Ids, Nats]]:
    """Scores the missing blocks of references and yields the arguments of `ReferenceWriter.append`.

    No micro-batch reaches into the next part. The missing blocks of a part are thus scored with the
    same neighbours after any interruption and with any number of replicas, and their losses are
    bit-identical even if neighbours affect the last bits, as with FP8 or experts. The last
    micro-batch of a part is padded with repeats of its last block, and the last group with repeats
    of a micro-batch, so that all replicas have equally many.

    Args:
        missing: ids of the blocks that are still to be scored, int64, ascending.
        manifest: the parts and the scored lengths of the references.
        losses_at: scores blocks over several lengths, nats per token, float32 [C, L].
        micro_batch_size: blocks in one forward pass of one replica.
        replicas: data-parallel size.

    Yields:
        Ids of blocks, int64 [C], and their losses, float32 [C, L]; 0 for a sample without targets,
        which is never chosen.
    """
    ends = np.searchsorted(manifest.part_of(missing), np.arange(manifest.num_parts), side="right")
    parts = [part for part in np.split(missing, ends[:-1]) if len(part)]
    padded = [np.pad(part, (0, -len(part) % micro_batch_size), mode="edge") for part in parts]
    batches = np.concatenate([missing[:0], *padded]).reshape(-1, micro_batch_size)
    for start in range(0, len(batches), _BATCHES_PER_CALL * replicas):
        group = batches[start : start + _BATCHES_PER_CALL * replicas]
        padded_ids = np.pad(group, ((0, -len(group) % replicas), (0, 0)), mode="edge").ravel()
        losses = losses_at(padded_ids, manifest.lengths)
        own_ids, first = np.unique(padded_ids, return_index=True)
        yield own_ids, np.where(np.isneginf(losses), np.float32(0), losses)[first]
