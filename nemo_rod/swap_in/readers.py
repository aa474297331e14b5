"""What one rank of each replica reads of its candidates, made known to all ranks.

Which ranks of a job read data differs: all of them, or the first tensor-parallel rank of the first
and the last pipeline stage. The *reader* of a replica is the one rank that always does and has the
losses as well: the first tensor-parallel rank of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def is_reader(groups: Any) -> bool:
    """Whether this rank is the reader of its replica."""
    return groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0


def broadcast_from_readers(
    facts: Callable[[], np.ndarray], shape: tuple[int, ...], groups: Any
) -> np.ndarray:
    """Calls a function on the readers and gives its results to all ranks; a collective call.

    Args:
        facts: gives numbers of this shape; only called on readers, and not collective itself.
        shape: of one replica's numbers.
        groups: Megatron's process groups (`tp`, `pp` and `dp`).

    Returns:
        float64 `[R, *shape]`, by replica, the same on every rank. Whole numbers below 2**53 are
        exact.

    Raises:
        ValueError: on all ranks, if one reader's function raised it.
    """
    numbers = np.zeros(1 + int(np.prod(shape)))  # a fault, then the facts
    fault: ValueError | None = None
    if is_reader(groups):
        try:
            numbers[1:] = facts().ravel()
        except ValueError as error:
            numbers[0], fault = 1, error
    everyone = _to_all(torch.from_numpy(numbers).cuda(), groups).cpu().numpy()
    if fault is not None:
        raise fault
    if everyone[:, 0].any():
        replica = int(np.argmax(everyone[:, 0]))
        raise ValueError(f"Replica {replica} cannot go on; the message of its reader says why.")
    return everyone[:, 1:].reshape(-1, *shape)


def _to_all(mine: torch.Tensor, groups: Any) -> torch.Tensor:
    """From the reader over its replica, and from every replica to all: `[R, n]`."""
    tp, pp, dp = groups.tp, groups.pp, groups.dp
    if tp.size() > 1 and pp.rank() == pp.size() - 1:
        dist.broadcast(mine, group=tp, group_src=0)
    if pp.size() > 1:
        dist.broadcast(mine, group=pp, group_src=pp.size() - 1)
    if dp.size() == 1:
        return mine[None]
    everyone = mine.new_empty(dp.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=dp)
    return everyone.view(dp.size(), len(mine))
