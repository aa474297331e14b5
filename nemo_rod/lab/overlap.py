"""How much of the holdout also occurs in the training blocks.

No block is on both sides, but text recurs: a licence, a quotation, a page packed at a different
offset. This module counts the windows of 64 tokens of held-out blocks that also occur, at any
position, in a training block of any source. If many do, use `document_holdout` and `dedup`.

Windows are compared by a 64-bit rolling hash, within blocks (not across block boundaries).

Shape suffixes: S = tokens per block, N = blocks, W = windows of a block (S - window + 1).
"""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.input_files import pick_evenly
from nemo_rod.corpus.store import BlockStore

_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers have inverses modulo 2**64


@dataclass(frozen=True)
class Overlap:
    """The text that the held-out blocks of a source share with the training blocks."""

    blocks: int  # held-out ones that were checked
    sharing: int  # blocks that share at least one window
    windows: int  # windows in these blocks
    shared: int  # windows that also occur in a training block

    @property
    def share(self) -> float:
        """Fraction of the blocks that share a window."""
        return self.sharing / self.blocks if self.blocks else 0.0


def overlap_report(
    root: str | os.PathLike[str], *, window: int = 64, max_blocks: int = 256
) -> dict[str, Overlap]:
    """Searches all training blocks for windows of the held-out blocks.

    Memory is bounded by `max_blocks`; the training blocks are streamed once. At most `max_blocks`
    held-out blocks of a source are checked, evenly spaced.

    Raises:
        ValueError: the window is longer than a block.
    """
    train, held = BlockStore(root), BlockStore(root, "holdout")
    if not 1 <= window <= train.block_size:
        raise ValueError(
            f"window must lie between 1 and the block size {train.block_size}, found {window}"
        )
    chosen = {
        s.name: np.array(pick_evenly(range(s.start, s.start + s.count), max_blocks), dtype=np.int64)
        for s in held.sources
    }
    known = np.unique(
        np.concatenate([_windows(held.tokens(ids), window).ravel() for ids in chosen.values()])
    )
    is_shared = np.zeros(len(known), dtype=bool)
    for ids in train.chunks() if len(known) else ():
        hashes = np.sort(_windows(train.tokens(ids), window), axis=None)  # found in order, quickly
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        is_shared[at[known[at] == hashes]] = True
    report = {}
    for name, ids in chosen.items():
        hashes_NW = _windows(held.tokens(ids), window)
        shared_NW = is_shared[np.searchsorted(known, hashes_NW)]
        report[name] = Overlap(
            len(ids), int(shared_NW.any(axis=1).sum()), shared_NW.size, int(shared_NW.sum())
        )
    return report


def _windows(tokens_NS: NDArray[np.int32], window: int) -> NDArray[np.uint64]:
    """Returns the polynomial hash of every window, uint64 [N, W]; arithmetic is modulo 2**64."""
    size = tokens_NS.shape[1]
    values = tokens_NS.astype(np.uint64) + np.uint64(1)
    values *= np.uint64(0xBF58476D1CE4E5B9)  # scatter the ids, which are small and similar
    values ^= values >> np.uint64(31)
    power, inverse = _powers(_BASE, size), _powers(pow(_BASE, -1, 2**64), size)
    sums = np.zeros((len(values), size + 1), dtype=np.uint64)
    np.cumsum(values * power, axis=1, out=sums[:, 1:])
    hashes: NDArray[np.uint64] = sums[:, window:] - sums[:, :-window]
    return hashes * inverse[: size - window + 1]


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
