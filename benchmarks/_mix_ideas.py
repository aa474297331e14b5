"""Two ideas for more of RoD's gain at the price of `rod_mix`; docs/research/mix.md measures them.

    selection.policy=benchmarks/_mix_ideas.py:Parts    sources split into parts by the base's loss
    selection.policy=benchmarks/_mix_ideas.py:Scored   blocks of one role, or some of them, scored

The second, of replay, needs selection.score=benchmarks/_mix_ideas.py:forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nemo_rod.roles import SourceRow
from nemo_rod.selection.arrays import Floats, Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.mix import Mix
from nemo_rod.selection.policies import LOSSES


@dataclass(eq=False)
class Parts(Mix):
    """Every source is split at quantiles of the base's loss; each part has its own average."""

    parts: int = 2
    losses: str = ""  # file of the base's losses of all blocks, float [blocks], NaN where unknown
    replay: bool = True  # whether replay is split, too
    _ends: dict[str, Any] = field(default_factory=dict, repr=False)

    def estimate(self, pool: Pool) -> Nats:
        """Returns a score for every candidate, nats, float32 [C]."""
        return super().estimate(self.split(pool))

    def observe(self, choice: Choice, loss_K: Nats) -> None:
        """Updates the averages of the parts; see `Mix.observe`."""
        super().observe(replace(choice, pool=self.split(choice.pool)), loss_K)

    def metrics(self, choice: Choice) -> dict[str, float | None]:
        """Returns kappa and the target of every part of new text."""
        return super().metrics(replace(choice, pool=self.split(choice.pool)))

    def split(self, pool: Pool) -> Pool:
        """Returns the pool with parts in place of its sources."""
        if not self._ends:
            self._ends["losses"] = np.load(self.losses)
            for source in pool.sources:
                own = self._ends["losses"][source.start : source.start + source.count]
                at = np.arange(1, self.parts) / self.parts if self._is_split(source) else []
                self._ends[source.name] = np.nanquantile(own, at)
        part_C, sources = np.zeros_like(pool.source_C), list[SourceRow]()
        for number, source in enumerate(pool.sources):
            in_C = pool.source_C == number
            ends = self._ends[source.name]
            part_C[in_C] = len(sources) + np.searchsorted(
                ends, self._ends["losses"][pool.block_ids[in_C]]
            )
            count = source.count // (len(ends) + 1)
            sources += [
                SourceRow(f"{source.name}.{part}", source.role, source.start, count)
                for part in range(len(ends) + 1)
            ]
        return replace(pool, source_C=part_C, sources=sources)

    def _is_split(self, source: SourceRow) -> bool:
        return self.replay or source.role == "adaptation"


@dataclass(eq=False)
class Scored(Mix):
    """Candidates of one role, or the first of them, are scored; the others have estimates."""

    role: str = "replay"
    share: float = 1.0  # of the role's candidates in a pool whose scores are used

    @property
    def needs(self) -> frozenset[str]:
        """A scoring pass, and references as the targets ask."""
        return LOSSES | super().needs

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns the positions of the k highest scores and estimates, weighed."""
        assert score_C is not None
        estimate_C = self.estimate(pool)
        own = np.flatnonzero(pool.is_replay_C == (self.role == "replay"))
        scored = own[: round(self.share * len(own))]
        estimate_C[scored] = score_C[scored]
        return super().select(pool, estimate_C, k)


def forgotten(loss_C: Floats, reference_C: Floats) -> Nats:
    """Returns what was forgotten of replay, and the loss of new text, nats, float32 [C]."""
    forgotten_C: Nats = (loss_C - np.nan_to_num(reference_C)).astype(np.float32)
    return forgotten_C
