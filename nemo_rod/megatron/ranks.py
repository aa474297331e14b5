"""Which rank writes, and how all ranks learn of one rank's fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_recorder() -> bool:
    """Whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


def from_recorder(find: Callable[[], T]) -> T:
    """What the rank that writes finds in its files, on every rank. Collective."""
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, find() if is_recorder() else None)
    return everyone[-1]  # type: ignore[return-value]


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
