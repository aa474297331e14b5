"""Prepares what the next step needs while the current one scores and trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls a function of the step one step ahead, in its own thread.

    Args:
        prepare: Returns what a step needs, given only its number; it may be called for steps that
            never run.
    """

    def __init__(self, prepare: Callable[[int], T]) -> None:
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[int, Future[T]] | None = None

    def take(self, step: int) -> T:
        """Returns what a step needs, or raises what `prepare` did; starts preparing the next."""
        if self._next is not None and self._next[0] == step:
            prepared = self._next[1].result()
        else:
            prepared = self._prepare(step)
        self._next = step + 1, self._thread.submit(self._prepare, step + 1)
        return prepared
