"""Documents that are made, as an input of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from nemo_rod.corpus.formats import Input


class TextList(Input):
    """Documents that are generated rather than read.

    Args:
        name: name in the manifest.
        size: size in bytes of the data they are made from; None if there is none.
        make: returns the documents, the same at every call.
    """

    def __init__(self, name: str, size: int | None, make: Callable[[], Iterable[str]]) -> None:
        super().__init__(name, size)
        self._make = make

    def read(self, start: int) -> Iterator[str | None]:
        """Yields every document."""
        return islice(self._make(), start, None)
