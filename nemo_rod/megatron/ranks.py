"""Which rank writes, how all ranks learn of one rank's fault, and that they chose the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod.selection import Choice

T = TypeVar("T")


def is_recorder() -> bool:
    """Whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


def from_recorder(find: Callable[[], T]) -> T:
    """What the rank that writes finds in its files, on every rank. Collective."""
    # not gathered from all: every rank would then make room for as many as there are ranks
    found = [find() if is_recorder() else None]
    dist.broadcast_object_list(found, src=dist.get_world_size() - 1)
    return found[0]  # type: ignore[return-value]


def all_or_none(function: Callable[[], T]) -> T:
    """Calls a function on every rank; what one rank cannot do is an error on all. Collective.

    Args:
        function: what to do; it must not be collective itself.

    Raises:
        ValueError: what the first rank that failed has to say, be it of a value or a file.
    """
    result, fault = None, None
    try:
        result = function()
    except (ValueError, OSError) as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for found in faults:
        if found is not None:
            raise ValueError(found)
    return result  # type: ignore[return-value]


def refuse_different_choices(choice: Choice) -> None:
    """Ends the run on all ranks if they are about to train on different blocks. Collective.

    Every rank selects by itself and reads its blocks by their ids: ranks that share a replica and
    disagree would train on a mixture of blocks, and nothing else would notice.

    Raises:
        ValueError: on every rank, naming the step.
    """
    chosen = np.stack([choice.block_ids, choice.chosen]).astype("<i8")
    digest = hashlib.blake2b(chosen.tobytes(), digest_size=8).digest()
    mine = int.from_bytes(digest, "big") >> 1  # 63 bits, so that its negative is an int64, too
    # one reduction for both: the largest of the negatives is the negative of the smallest
    ends = torch.tensor([mine, -mine]).cuda()
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    largest, negative_smallest = ends.tolist()
    if largest != -negative_smallest:
        raise ValueError(
            f"step {choice.pool.step}: ranks chose different blocks, where all must choose the "
            "same: their files, software or GPUs differ; give all nodes the same ones and resume "
            "from the last checkpoint."
        )
