"""Agreement between ranks: which one writes, how a fault spreads, and that choices are equal."""

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
    """Returns whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


def from_recorder(find: Callable[[], T]) -> T:
    """Returns on every rank what `find` returns on the recording rank. Collective."""
    # a broadcast, as gathering would allocate one result per rank on every rank
    found = [find() if is_recorder() else None]
    dist.broadcast_object_list(found, src=dist.get_world_size() - 1)
    return found[0]  # type: ignore[return-value]


def all_or_none(function: Callable[[], T]) -> T:
    """Calls a function on every rank and raises on all if it fails on one. Collective.

    Args:
        function: the function to call; it must not be collective itself.

    Raises:
        ValueError: the function raised ValueError or OSError on some rank; the message is that of
            the first such rank.
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

    Every rank selects independently and reads its blocks by id: ranks of one replica that disagree
    would train on a mixture of blocks, and nothing else would detect it.

    Raises:
        ValueError: the choices differ; raised on every rank, with the step.
    """
    chosen = np.stack([choice.block_ids, choice.chosen]).astype("<i8")
    digest = hashlib.blake2b(chosen.tobytes(), digest_size=8).digest()
    mine = int.from_bytes(digest, "big") >> 1  # 63 bits, so that its negative fits an int64, too
    # a single reduction: the maximum of the negatives is the negative of the minimum
    ends = torch.tensor([mine, -mine]).cuda()
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    largest, negative_smallest = ends.tolist()
    if largest != -negative_smallest:
        raise ValueError(
            f"step {choice.pool.step}: ranks chose different blocks, where all must choose the "
            "same: their files, software or GPUs differ; give all nodes the same ones and resume "
            "from the last checkpoint."
        )
