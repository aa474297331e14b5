"""Packs documents into blocks: appends EOD to each, concatenates them, and cuts the stream.

    doc doc doc EOD doc EOD doc doc | doc doc doc doc doc EOD doc EOD | doc doc ...
    `----------- block 0 ---------' `----------- block 1 -----------'  the rest: dropped

Packing never mixes sources: the caller creates one packer for each. The last, partial block is
dropped (the paper, "Data": partial final sequences are discarded) and counted.

Shape suffixes: S = tokens per block, N = blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Packer:
    """Cuts a stream of documents into blocks of S tokens.

    Attributes:
        rest: int32 [< S], the tokens that do not fill a block yet. They are dropped at the end of
            the stream. This is the packer's entire state, from which another packer can resume.

    Args:
        block_size: tokens per block (S).
        eod_id: the token after every document.
        rest: the `rest` of a packer to resume from.
    """

    def __init__(self, block_size: int, eod_id: int, rest: ArrayLike = ()) -> None:
        if block_size < 2:
            raise ValueError(f"block_size must be at least 2 (one target), found {block_size}")
        self.block_size = block_size
        self.rest: NDArray[np.int32] = np.array(rest, dtype=np.int32)
        assert len(self.rest) < block_size, "the rest of a packer is shorter than a block"
        self._eod = np.array([eod_id], dtype=np.int32)

    def add(self, documents: Sequence[ArrayLike], *, go_on: bool = False) -> NDArray[np.int32]:
        """Adds documents and returns the blocks that are now full, int32 [N, S].

        Args:
            documents: token ids of each document, without EOD.
            go_on: whether the last one has no end here: the first of the next call follows it.
        """
        parts = [self.rest]
        for document in documents:
            parts += [np.asarray(document, dtype=np.int32), self._eod]
        if go_on:
            parts.pop()
        stream = np.concatenate(parts)
        count = len(stream) // self.block_size
        self.rest = stream[count * self.block_size :].copy()  # a view would keep the whole stream
        return stream[: count * self.block_size].reshape(count, self.block_size)


def pack(
    documents: Iterable[ArrayLike], block_size: int, eod_id: int
) -> Iterator[NDArray[np.int32]]:
    """Yields the blocks of a `Packer`, int32 [S], one at a time; drops the partial one at the end.

    Example:
        >>> list(pack([[5, 6], [7, 8, 9]], block_size=4, eod_id=0))
        [array([5, 6, 0, 7], dtype=int32)]
    """
    packer = Packer(block_size, eod_id)
    for document in documents:
        yield from packer.add([document])
