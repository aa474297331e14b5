"""Agreement between ranks: which one writes, how a fault spreads, and that choices are equal.

No collective here gathers an object from every rank at once: torch would allocate, on every rank,
as many copies of the largest one as there are ranks.
"""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod.selection import Choice

T = TypeVar("T")


def is_recorder() -> bool:
    """Returns whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


def peak_memory() -> dict[str, float]:
    """Returns `memory/peak_gib` of this rank: CUDA's, or without a GPU the process's."""
    if torch.cuda.is_available():
        return {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/peak_gib": kibibytes / 2**20}


def from_recorder(find: Callable[[], T], *, src: int | None = None, group: Any = None) -> T:
    """Calls `find` on the recording rank and returns its result on every rank. Collective.

    Another rank of a group may be given as `src`.

    Raises:
        ValueError: `find`, which must not be collective, raised ValueError or OSError.
    """
    sent: list[Any] = [None, None]
    src = dist.get_world_size(group) - 1 if src is None else src
    if dist.get_rank(group) == src:
        try:
            sent[0] = find()
        except (ValueError, OSError) as error:
            sent[1] = str(error)
    dist.broadcast_object_list(sent, group=group, group_src=src)
    if sent[1] is not None:
        raise ValueError(sent[1])
    return sent[0]


def all_or_none(function: Callable[[], T]) -> T:
    """Calls a function on every rank and raises on all if it fails on one. Collective.

    The function itself must not be collective.

    Raises:
        ValueError: the function raised ValueError or OSError on some rank; the message is that of
            the first such rank.
    """
    result, fault = None, None
    try:
        result = function()
    except (ValueError, OSError) as error:
        fault = str(error)
    # the first rank at fault, then its message alone: as in `from_recorder`, no gathering
    world_size = dist.get_world_size()
    first = torch.tensor(world_size if fault is None else dist.get_rank()).cuda()
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first < world_size:
        message = [fault]
        dist.broadcast_object_list(message, src=int(first))
        raise ValueError(message[0])
    return result  # type: ignore[return-value]


def once_a_node(work: Callable[[], object]) -> None:
    """Calls a function on the first rank of every node while its other ranks wait. Collective.

    Raises:
        ValueError: the function raised ValueError or OSError on some rank.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    all_or_none(lambda: work() if is_first else None)


def on_all_ranks(facts: list[bool]) -> list[bool]:
    """Returns which of the same facts, in the same order, hold on every rank. Collective."""
    holds = torch.tensor(facts, dtype=torch.uint8).cuda()
    dist.all_reduce(holds, op=dist.ReduceOp.MIN)
    return [bool(value) for value in holds.tolist()]


def from_all_ranks(own: list[T]) -> list[T]:
    """Gathers the non-empty results of all ranks on every rank. Collective.

    The ranks broadcast in turn, so that memory does not grow with their number.
    """
    senders = torch.zeros(dist.get_world_size(), dtype=torch.uint8).cuda()
    senders[dist.get_rank()] = bool(own)
    dist.all_reduce(senders, op=dist.ReduceOp.MAX)
    results: list[T] = []
    for rank in senders.nonzero().flatten().tolist():
        sent = [own]
        dist.broadcast_object_list(sent, src=rank)
        results += sent[0]
    return results


def refuse_different_choices(choice: Choice, group: Any = None) -> None:
    """Ends the run on all ranks if they are about to train on different blocks. Collective.

    Every rank selects independently and reads its blocks by id: ranks of one replica that disagree
    would train on a mixture of blocks, undetected.

    Raises:
        ValueError: the choices differ; raised on every rank, with the step.
    """
    chosen = np.stack([choice.block_ids, choice.chosen]).astype("<i8")
    digest = hashlib.blake2b(chosen.tobytes(), digest_size=8).digest()
    own = int.from_bytes(digest, "big") >> 1  # 63 bits, so that its negative fits an int64, too
    # a single reduction: the maximum of the negatives is the negative of the minimum
    ends = torch.tensor([own, -own], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    largest, negative_smallest = ends.tolist()
    if largest != -negative_smallest:
        raise ValueError(
            f"step {choice.pool.step}: ranks chose different blocks, where all must choose the "
            "same: their files, software or GPUs differ; give all nodes the same ones and resume "
            "from the last checkpoint."
        )
