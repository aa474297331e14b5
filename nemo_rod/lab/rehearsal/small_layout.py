"""A parallel layout in small: two of everything that the layout has more than one of."""

from __future__ import annotations

import dataclasses

from nemo_rod.config import Parallel

_GIVEN_UP = ("data", "context", "pipeline", "tensor")  # in this order, where processes are missing


def small_layout(parallel: Parallel, processes: int | None) -> tuple[Parallel, list[str]]:
    """Returns a layout in small, and the axes that could not be kept above one.

    Args:
        parallel: the layout of the real run.
        processes: the most processes that can run; None if there is no limit.
    """
    axes = ("data", "tensor", "pipeline", "context", "virtual_pipeline", "expert")
    small = dataclasses.replace(parallel)
    for axis in axes:
        setattr(small, axis, min(2, getattr(parallel, axis)))
    for axis in _GIVEN_UP:
        if processes is None or small.world_size <= processes:
            break
        setattr(small, axis, 1)
    if small.pipeline == 1:
        small.virtual_pipeline = 1
    if small.tensor == 1:
        small.sequence = False
    if small.data * small.tensor * small.context % small.expert:
        small.expert = 1
    lost = [axis for axis in axes if getattr(small, axis) < min(2, getattr(parallel, axis))]
    return small, lost
