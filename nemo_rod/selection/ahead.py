"""What the next step asks for, made ready while this one scores and trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls a function of the step, one step ahead, in a thread of its own.

    Args:
        prepare: Gives what a step needs, from the step alone; it may be called for steps that never
            come.
    """

    def __init__(self, prepare: Callable[[int], T]) -> None:
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[int, Future[T]] | None = None

    def take(self, step: int) -> T:
        """Returns what a step needs, and begins with the step after it.

        Raises:
            Exception: What `prepare` raised for this very step.
        """
        if self._next is not None and self._next[0] == step:
            prepared = self._next[1].result()
        else:
            prepared = self._prepare(step)
        self._next = step + 1, self._thread.submit(self._prepare, step + 1)
        return prepared
