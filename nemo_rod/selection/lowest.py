"""Several reference models for the same blocks: the lowest loss counts.

`min(ref_A, theta_0)` asks of a block only what the better of the two models can do: a specialist
that is worse than the base on some blocks would leave them a score that says too little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.reference_folder import open_folder
from nemo_rod.selection.references import HashedBlocks, References


class ReferenceLosses(Protocol):
    """What scoring asks of references: of `References`, or of several at once."""

    digest: str

    def checked_sums(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the sums of the reference's token losses over eighths of blocks, nats [C, 8]."""


class LowestReferences:
    """Looks blocks up in several `References` that each cover the store; see there.

    The reference of a block is the model with the lowest loss on the whole of it, the first of
    equals, also where only a prefix of the block is scored.

    Attributes:
        digest: Digest of all of them, hex.
    """

    def __init__(self, references: Sequence[References]) -> None:
        """Combine open references."""
        self._references = tuple(references)
        digests = "\n".join(one.digest for one in references).encode()
        self.digest = hashlib.blake2b(digests, digest_size=16, person=b"rod-refs-low").hexdigest()

    def checked_sums(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the sums of the model that is best on each block, nats, float32 [C, 8]."""
        sums_MC8 = np.stack([one.checked_sums(block_ids) for one in self._references])
        total_MC = sums_MC8.astype(np.float64).sum(axis=-1)
        best_C = np.argmin(total_MC, axis=0)
        lowest: npt.NDArray[np.float32] = sums_MC8[best_C, np.arange(len(best_C))]
        return lowest


def open_references(paths: Iterable[str | Path], store: HashedBlocks) -> ReferenceLosses:
    """Opens folders of references that cover a store; of several of the same blocks, the lowest.

    Raises:
        ValueError: as `References.open` does, of folders that overlap but not whole.
    """
    alternatives: dict[tuple[int, int], list[Path]] = {}
    for path in map(Path, paths):
        manifest = open_folder(path).manifest
        alternatives.setdefault((manifest.start, manifest.stop), []).append(path)
    rows = list(zip_longest(*alternatives.values()))
    first = rows[0] if rows else ()
    sets = [
        References.open([one or other for one, other in zip(row, first, strict=True)], store)
        for row in rows or [()]
    ]
    return sets[0] if len(sets) == 1 else LowestReferences(sets)
