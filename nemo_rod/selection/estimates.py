"""Scores without a scoring pass, from the mean and variance of recent scores of each source.

Between two scoring passes, or always after the first, a candidate's score is drawn from the recent
distribution of scores of its source:

    score ~ Normal(mean, variance of reducible loss over the last blocks of its source)

If real scores are distributed like that, a joint top-k of such draws has the same replay share and
the same share of each source as one of real scores; chance decides which blocks of a source are
taken. The chosen blocks are therefore an unbiased sample of their source, and their losses, which
the training step computes anyway, keep the averages up to date.

Shape suffixes: C = candidates, N = blocks observed, M = sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.curriculum.log import StepRecord
from nemo_rod.selection.permutation import derive_key
from nemo_rod.selection.policies import Score, reducible_loss
from nemo_rod.selection.references import References

# A mean over fewer blocks is too noisy; one over many more lags behind the learning model.
MEMORY_BLOCKS = 8
# Nats. At the base, all replay scores are equal up to rounding errors, which must not matter.
MIN_DEVIATION = 1e-3


@dataclass(eq=False)
class SourceAverages:
    """Estimates scores from the sources of blocks.

    Attributes:
        mean: mean reducible loss of each source's recent blocks, nats, float64 [M]; NaN before any.
        variance: variance of the same losses, float64 [M].
    """

    source_index: Callable[[Ids], Ids]  # of blocks, int64 [N] -> int64 [N] below M
    num_sources: int  # M
    _: KW_ONLY
    every: int  # steps between two scoring passes; 0 for none after the first
    seed: int  # of the draws
    score: Score = reducible_loss

    def __post_init__(self) -> None:
        self.mean = np.full(self.num_sources, np.nan)
        self.variance = np.zeros(self.num_sources)
        self._blocks = np.zeros(self.num_sources, dtype=np.int64)  # roughly, blocks in the mean
        self._seen = np.full(self.num_sources, -1)  # last step that observed the source

    @property
    def has_seen(self) -> bool:
        """Whether any block has been observed."""
        return bool(self._blocks.any())

    def is_due(self, step: int) -> bool:
        """Whether a step has a scoring pass: the first one, then one every `every` steps."""
        return not self.has_seen or (self.every > 0 and step % self.every == 0)

    def estimate(self, pool: Pool) -> Nats:
        """Returns a score for every candidate, nats, float32 [C].

        A source with low scores is hardly ever chosen, so a rise would be missed. If the least
        recently observed source was last seen more steps ago than there are sources, one of its
        candidates therefore outranks all others: at most one block per batch.
        """
        source_C = self.source_index(pool.block_ids)
        mean = np.where(np.isnan(self.mean), np.nanmean(self.mean), self.mean)
        draws = np.random.default_rng((derive_key(self.seed, "averages"), pool.step))
        normal_C = draws.standard_normal(len(source_C))
        deviation = np.maximum(np.sqrt(self.variance), MIN_DEVIATION)
        estimate_C = mean[source_C] + deviation[source_C] * normal_C
        score_C: Nats = estimate_C.astype(np.float32)
        oldest = int(np.argmin(self._seen[source_C]))
        if pool.step - self._seen[source_C[oldest]] > len(self.mean):
            score_C[oldest] = np.nextafter(score_C.max(), np.float32(np.inf))
        return score_C

    def observe(self, step: int, block_ids: Ids, rho: Nats) -> None:
        """Updates the averages with the scores of blocks.

        Args:
            step: step whose weights the scores were computed with.
            block_ids: int64 [N], an unbiased sample of each source's blocks.
            rho: reducible losses, nats per token, float32 [N]; non-finite values are ignored.
        """
        known = np.isfinite(rho)
        source_N, rho_N = self.source_index(block_ids[known]), rho[known].astype(np.float64)
        for source in np.unique(source_N):
            new = rho_N[source_N == source]
            self._blocks[source] = min(self._blocks[source], MEMORY_BLOCKS) + len(new)
            weight = len(new) / self._blocks[source]
            before = new.mean() if np.isnan(self.mean[source]) else self.mean[source]
            self.mean[source] = before + weight * (new.mean() - before)
            spread = ((new - self.mean[source]) ** 2).mean()
            self.variance[source] += weight * (spread - self.variance[source])
            self._seen[source] = step

    def replay(self, records: Iterable[StepRecord], references: References) -> None:
        """Rebuilds the averages from a run's records, from its first step on."""
        for record in records:
            rho_C = self.score(record.loss, references[record.block_ids])
            self.observe(record.step, record.block_ids, rho_C)

    @property
    def state(self) -> dict[str, Any]:
        """The values that `observe` changes, to be restored elsewhere."""
        return {k: getattr(self, k) for k in ("mean", "variance", "_blocks", "_seen")}

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
