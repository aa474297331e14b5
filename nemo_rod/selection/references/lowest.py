"""Several reference models for the same blocks: the lowest loss counts.

`min(ref_A, theta_0)` scores a block against the better of the two models: if the specialist is
worse than the base on some blocks, its loss alone would make their scores too low.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Nats
from nemo_rod.selection.blocks import HashedBlocks
from nemo_rod.selection.references.folder import open_folder
from nemo_rod.selection.references.lookup import ReferenceLosses, References


class LowestReferences(ReferenceLosses):
    """Looks blocks up in several open `References` that each cover the store."""

    def __init__(self, references: Sequence[References]) -> None:
        self._references = tuple(references)
        digests = "\n".join(one.digest for one in references).encode()
        self.digest = hashlib.blake2b(digests, digest_size=16, person=b"rod-refs-low").hexdigest()

    @property
    def files(self) -> list[Path]:
        """The files that lookups read at random, each once."""
        return list(dict.fromkeys(file for one in self._references for file in one.files))

    def prefix(self, block_ids: npt.ArrayLike, eighths: int) -> Nats:
        """Return the lowest loss over the first eighths of each block; see `References.prefix`."""
        losses = [one.prefix(block_ids, eighths) for one in self._references]
        lowest: Nats = np.minimum.reduce(losses)
        return lowest


def open_references(
    paths: Iterable[str | Path],
    store: HashedBlocks,
    *,
    distilled: bool = False,
    precision: str | None = None,
) -> ReferenceLosses:
    """Opens folders of references that cover a store; several of the same blocks give the lowest.

    Args:
        paths: The folders, in any order.
        store: The block store that they must belong to.
        distilled: See `References.open`.
        precision: See `References.open`.

    Raises:
        ValueError: See `References.open`; folders must either not overlap or cover the same blocks.
    """
    alternatives: dict[tuple[int, int], list[Path]] = {}
    for path in map(Path, paths):
        manifest = open_folder(path).manifest
        alternatives.setdefault((manifest.start, manifest.stop), []).append(path)
    rows = list(zip_longest(*alternatives.values()))
    first = rows[0] if rows else ()
    sets = [
        References.open(
            [one or other for one, other in zip(row, first, strict=True)],
            store,
            distilled=distilled,
            precision=precision,
        )
        for row in rows or [()]
    ]
    return sets[0] if len(sets) == 1 else LowestReferences(sets)
