"""Scores without a scoring pass: what blocks of a source cost on average, and how that varies.

Between two scoring passes, or ever after the first, a candidate's score is a draw from what the
scores of its source were like lately:

    score ~ Normal(mean, variance of reducible loss over the last blocks of its source)

A joint top-k of such draws replays as much, and as much of which source, as one of real scores
does where scores vary like that; which blocks of a source it takes is left to chance. For the same
reason the blocks that were chosen are a fair sample of their source, and their losses, which the
training step computes anyway, keep the averages up to date.

Shape suffixes: C = candidates, N = blocks observed, M = sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.curriculum.log import StepRecord
from nemo_rod.selection.permutation import derive_key
from nemo_rod.selection.policies import reducible_loss
from nemo_rod.selection.references import ReferenceLosses

# A mean over fewer blocks is too noisy, one over many more lags behind a model that learns.
MEMORY_BLOCKS = 8
# Nats. At the base all scores of replay are equal but for rounding, which must not decide.
MIN_DEVIATION = 1e-3


class SourceAverages:
    """Guesses scores from the sources of blocks.

    Args:
        source_index: Gives the source of every block, int64 [N] -> int64 [N] below M.
        num_sources: How many there are (M).
        every: Steps between two scoring passes; 0 for none after the first.
        seed: Of the draws.

    Attributes:
        mean: Of the reducible loss of each source's last blocks, nats, float64 [M]; NaN before any.
        variance: Of the same, float64 [M].
    """

    def __init__(
        self,
        source_index: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
        num_sources: int,
        *,
        every: int,
        seed: int,
    ) -> None:
        self._source_index, self._every, self._seed = source_index, every, seed
        self.mean = np.full(num_sources, np.nan)
        self.variance = np.zeros(num_sources)
        self._blocks = np.zeros(num_sources, dtype=np.int64)  # that the mean is over, roughly
        self._seen = np.full(num_sources, -1, dtype=np.int64)  # last step with a loss of the source

    @property
    def has_seen(self) -> bool:
        """Whether any block was observed."""
        return bool(self._blocks.any())

    def is_due(self, step: int) -> bool:
        """Whether the pool of a step is to be scored: the first, and every so many after it."""
        return not self.has_seen or (self._every > 0 and step % self._every == 0)

    def estimate(self, pool: Pool) -> npt.NDArray[np.float32]:
        """Returns a score for every candidate, nats, float32 [C].

        A source whose scores are low is hardly ever chosen, and would never be seen to rise. So the
        one that was not seen for longest, if for more steps than there are sources, has a candidate
        that outranks all others: one block of a batch at most.
        """
        source_C = self._source_index(pool.block_ids)
        mean = np.where(np.isnan(self.mean), np.nanmean(self.mean), self.mean)
        draws = np.random.default_rng((derive_key(self._seed, "averages"), pool.step))
        normal_C = draws.standard_normal(len(source_C))
        deviation = np.maximum(np.sqrt(self.variance), MIN_DEVIATION)
        estimate_C = mean[source_C] + deviation[source_C] * normal_C
        score_C: npt.NDArray[np.float32] = estimate_C.astype(np.float32)
        oldest = int(np.argmin(self._seen[source_C]))
        if pool.step - self._seen[source_C[oldest]] > len(self.mean):
            score_C[oldest] = np.nextafter(score_C.max(), np.float32(np.inf))
        return score_C

    def observe(
        self, step: int, block_ids: npt.NDArray[np.int64], rho: npt.NDArray[np.float32]
    ) -> None:
        """Takes in the scores of blocks.

        Args:
            step: Whose weights the scores are of.
            block_ids: int64 [N], a fair sample of each source's.
            rho: Reducible losses, nats per token, float32 [N]; those that are no finite number do
                not count.
        """
        known = np.isfinite(rho)
        source, rho_N = self._source_index(block_ids[known]), rho[known].astype(np.float64)
        for index in np.unique(source):
            self._move(index, rho_N[source == index])
            self._seen[index] = step

    def _move(self, index: np.int64, rho: npt.NDArray[np.float64]) -> None:
        self._blocks[index] = min(self._blocks[index], MEMORY_BLOCKS) + len(rho)
        weight = len(rho) / self._blocks[index]
        before = rho.mean() if np.isnan(self.mean[index]) else self.mean[index]
        self.mean[index] = before + weight * (rho.mean() - before)
        spread = ((rho - self.mean[index]) ** 2).mean()
        self.variance[index] += weight * (spread - self.variance[index])

    def replay(self, records: Iterable[StepRecord], references: ReferenceLosses) -> None:
        """Takes in what a run recorded, from its first step on, as if it ran again."""
        for record in records:
            rho_C = reducible_loss(record.loss, references[record.block_ids])
            self.observe(record.step, record.block_ids, rho_C)

    @property
    def state(self) -> dict[str, Any]:
        """What is remembered, to be set elsewhere."""
        return {k: getattr(self, k) for k in ("mean", "variance", "_blocks", "_seen")}

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
