"""Provenance of a curriculum, without which its block ids and scores have no meaning.

Shape suffixes: C = candidates, K = chosen, S = tokens per block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.roles import ROLES, SourceRow
from nemo_rod.selection.arrays import Ids, Mask
from nemo_rod.selection.blocks import Blocks

MOST = 1 << 48  # bound of every count: steps, tokens, blocks
MOST_CANDIDATES, MOST_SOURCES = 1 << 22, 1 << 12
DIFFERENCE = "reducible_loss"  # the score that is the loss minus the reference loss


@dataclass(frozen=True, kw_only=True)
class CurriculumHeader:
    """Provenance of a curriculum; a run that differs in any field refuses to resume it."""

    num_candidates: int  # per step (C)
    num_chosen: int  # blocks trained on per step (K)
    block_size: int  # tokens per block (S)
    store: str  # digest of the block store
    tokenizer: str  # fingerprint of the tokenizer
    references: str  # their digest; "" if the arm has none
    config: str  # digest of everything else that affects the choices
    seed: int  # seed of the candidate stream
    sources: tuple[SourceRow, ...]  # those of the store, by ascending start
    scored: bool = True  # whether there are scores; if not, loss, score and tau are NaN
    first_step: int = 0  # step of the first record
    score: str = DIFFERENCE  # registered name of the score (`nemo_rod.parts`)

    def __post_init__(self) -> None:
        assert 1 <= self.num_chosen <= self.num_candidates, (self.num_chosen, self.num_candidates)
        rows = tuple(
            SourceRow(name, role, int(start), int(count))
            for name, role, start, count in self.sources
        )
        object.__setattr__(self, "sources", rows)

    @classmethod
    def of(cls, blocks: Blocks, references: Any, **choosing: Any) -> CurriculumHeader:
        """Returns the header of choices among blocks; `choosing` has all other fields.

        Args:
            blocks: what is chosen from.
            references: has a `digest`; None if the choices need none.
            choosing: the fields that describe how.
        """
        return cls(
            block_size=blocks.block_size,
            store=blocks.digest,
            tokenizer=blocks.tokenizer_fingerprint,
            references=references.digest if references else "",
            sources=tuple(SourceRow(s.name, s.role, s.start, s.count) for s in blocks.sources),
            **choosing,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a file has them: `score` only if it is not the default."""
        values = asdict(self)
        if self.score == DIFFERENCE:
            del values["score"]
        return values

    def check(self) -> None:
        """Refuses values of other types or sizes than a run writes; the error names the field."""
        for name in ("num_candidates", "num_chosen", "block_size", "seed", "first_step"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < MOST:
                raise ValueError(f"{name} is {value!r}, expected a number")
        if not isinstance(self.scored, bool):
            raise ValueError(f"scored is {self.scored!r}, expected true or false")
        for name in ("store", "tokenizer", "references", "config", "score"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} is {value!r}, expected a text")
        for count, most, what in (
            (self.num_candidates, MOST_CANDIDATES, "candidates in a step"),
            (len(self.sources), MOST_SOURCES, "sources"),
        ):
            if count > most:
                raise ValueError(f"it has {count:,} {what}, more than {most:,}")
        stop = 0
        for row in self.sources:
            named = isinstance(row.name, str) and row.role in ROLES
            if not named or not stop <= row.start <= MOST or not 0 <= row.count <= MOST:
                raise ValueError(f"sources has {row!r}")
            stop = row.start + row.count

    def source_index(self, block_ids: npt.ArrayLike) -> Ids:
        """Returns the index in `sources` of the source of every block id; -1 for padding."""
        starts = np.array([row.start for row in self.sources], dtype=np.int64)
        return np.searchsorted(starts, np.asarray(block_ids), side="right") - 1

    def is_replay(self, block_ids: npt.ArrayLike) -> Mask:
        """Returns for every block id whether it is replay; padding is not."""
        by_source = np.array([row.role == "replay" for row in self.sources] + [False])
        return by_source[self.source_index(block_ids)]


def refuse_foreign(path: Path, header: CurriculumHeader, expected: CurriculumHeader) -> None:
    """Raises a ValueError that names every field in which two headers differ."""
    differences = [
        f"{field.name} {value!r} (this run: {getattr(expected, field.name)!r})"
        for field in fields(CurriculumHeader)
        if (value := getattr(header, field.name)) != getattr(expected, field.name)
    ]
    if differences:
        raise ValueError(
            f"{path} was recorded with {', '.join(differences)}: continue with the recorded "
            "values, or remove it together with the checkpoints to begin again"
        )


def refuse_other_store(path: Path, header: CurriculumHeader, store: Blocks) -> None:
    """Raises a ValueError that names the first property in which a curriculum and a store differ.

    The tokenizer comes first, because everything else depends on it.
    """
    for name, value, expected in (
        ("tokenizer", header.tokenizer, store.tokenizer_fingerprint),
        ("block size", header.block_size, store.block_size),
        ("block store", header.store, store.digest),
    ):
        if value != expected:
            raise ValueError(
                f"{path} was recorded with {name} {value!r}, but the block store has {expected!r}: "
                "use the store that the curriculum was recorded with, or record one with this store"
            )
