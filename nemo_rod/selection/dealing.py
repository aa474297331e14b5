"""Which replica trains on which of the chosen blocks, and in which passes candidates are scored."""

from __future__ import annotations

from nemo_rod.selection.arrays import Ids


def deal(chosen_K: Ids, *, micro_batch_size: int, replicas: int) -> list[Ids]:
    """Deals the chosen blocks out to the replicas by whole micro-batches.

    No micro-batch thus depends on the number of replicas: some losses, such as a router's balancing
    loss, are computed over a micro-batch.

    Args:
        chosen_K: Block ids, or positions, int64 [K]; K a multiple of `micro_batch_size * replicas`.
        micro_batch_size: Blocks in one forward-backward pass of one replica.
        replicas: Data-parallel size.

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
    share: float = 1.0,
) -> tuple[int, int]:
    """Splits blocks into forward passes.

    The blocks of a replica are spread evenly over its passes: rounded up to whole micro-batches,
    2048 blocks on 1000 replicas in fours would be 4 blocks on each, where 3 suffice. A pass of
    prefixes has more of them, up to the same number of tokens, unless there is a pipeline, which
    needs many micro-batches rather than large ones. Its interleaved schedule needs a multiple of
    the number of its stages.

    Args:
        num_blocks: Blocks to score, over all replicas.
        micro_batch_size: Whole blocks in one forward pass of one replica.
        replicas: Data-parallel size.
        pipeline: Pipeline stages.
        chunks: Model chunks of a stage.
        share: Scored share of every block.

    Returns:
        Blocks in one pass of one replica, and passes of each replica. Together they may exceed
        `num_blocks`; the excess is padding.
    """
    per_replica, size = -(-num_blocks // replicas), micro_batch_size
    if pipeline == 1:
        size = int(size / share)
    if passes := -(-per_replica // size):
        size = -(-per_replica // passes)
    unit = pipeline if chunks > 1 else 1
    return size, unit * -(-per_replica // (size * unit))
