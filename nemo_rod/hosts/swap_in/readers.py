"""Broadcasts of what one rank of each replica knows about its candidates to all ranks.

Jobs differ in which ranks read data: all of them, or the first tensor-parallel rank of the first
and the last pipeline stage. The *reader* of a replica is the one rank that always reads data and
also has the losses: the first tensor-parallel rank of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def broadcast_from_readers(
    facts: Callable[[], np.ndarray], shape: tuple[int, ...], groups: Any
) -> np.ndarray:
    """Calls a function on the readers and broadcasts its results to all ranks. Collective.

    Args:
        facts: function that returns numbers of shape `shape`; it is only called on readers and must
            not be collective itself.
        shape: shape of one replica's numbers.
        groups: Megatron's process groups (`tp`, `pp` and `dp`).

    Returns:
        The numbers by replica, float64 `[R, *shape]`, the same on every rank. Whole numbers below
        2**53 are exact.

    Raises:
        ValueError: the function raised it on some reader; raised on all ranks.
    """
    numbers = np.zeros(1 + int(np.prod(shape)))  # a fault, then the facts
    fault: ValueError | None = None
    if groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0:
        try:
            numbers[1:] = facts().ravel()
        except ValueError as error:
            numbers[0], fault = 1, error
    everyone = _to_all(torch.from_numpy(numbers).cuda(), groups).cpu().numpy()
    if fault is not None:
        raise fault
    if everyone[:, 0].any():
        replica = int(np.argmax(everyone[:, 0]))
        raise ValueError(f"Replica {replica} cannot continue; the message of its reader says why.")
    return everyone[:, 1:].reshape(-1, *shape)


def _to_all(mine: torch.Tensor, groups: Any) -> torch.Tensor:
    """Broadcasts from each reader to its replica, then gathers from all replicas, `[R, n]`."""
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
