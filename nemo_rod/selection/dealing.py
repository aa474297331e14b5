"""Which replica trains on which of the chosen blocks, the same in every host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def deal(
    chosen_K: npt.NDArray[np.int64], *, micro_batch_size: int, replicas: int
) -> list[npt.NDArray[np.int64]]:
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
