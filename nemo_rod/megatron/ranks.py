"""Which rank writes, and how all ranks learn of one rank's fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_recorder() -> bool:
    """Whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


def all_or_none(function: Callable[[], T]) -> T:
    """Calls a function on every rank; a ValueError on one is raised on all. Collective.

    Args:
        function: what to do; it must not be collective itself.

    Raises:
        ValueError: the first rank's that failed.
    """
    result, fault = None, None
    try:
        result = function()
    except ValueError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for found in faults:
        if found is not None:
            raise ValueError(found)
    return result  # type: ignore[return-value]
