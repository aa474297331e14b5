"""Finds blocks by the heads of their hashes, with an in-memory index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Ids


class HashIndex:
    """Finds hash heads in a sorted list, through a directory of their leading bits.

    Heads are uniformly distributed, so a directory with about one entry per bucket leaves one or
    two search steps.
    """

    def __init__(self, heads_N: npt.NDArray[np.uint64]) -> None:
        # every rank of a node holds an index of its own, so the numbers are as small as they can be
        size = np.uint32 if len(heads_N) < 1 << 32 else np.int64
        self._order_N = np.argsort(heads_N, kind="stable").astype(size)
        self._sorted_N = heads_N[self._order_N]
        bits = max(1, len(heads_N).bit_length() - 1)
        self._shift = np.uint64(64 - bits)
        buckets = np.arange((1 << bits) + 1, dtype=np.uint64)
        self._begin = np.searchsorted(self._sorted_N >> self._shift, buckets).astype(size)

    def find(self, wanted_C: npt.NDArray[np.uint64]) -> Ids:
        """Return the first index of every head, int64 [C]; -1 if it is absent."""
        bucket_C = (wanted_C >> self._shift).astype(np.int64)
        at_C = self._begin[bucket_C].astype(np.int64)
        end_C = self._begin[bucket_C + 1].astype(np.int64)
        last = len(self._sorted_N) - 1
        behind_C = at_C < end_C
        while behind_C.any():
            behind_C = (at_C < end_C) & (self._sorted_N[np.minimum(at_C, last)] < wanted_C)
            at_C = at_C + behind_C
        at_C = np.minimum(at_C, last)
        return np.where(self._sorted_N[at_C] == wanted_C, self._order_N[at_C].astype(np.int64), -1)
