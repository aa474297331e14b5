"""A policy that needs few scoring passes: scores by the mean and variance of each source.

Between two scoring passes, or always after the first, a candidate's score is drawn from the recent
distribution of scores of its source:

    score ~ Normal(mean, variance of reducible loss over the last blocks of its source)

If real scores are distributed like that, a joint top-k of such draws has the same replay share and
the same share of each source as one of real scores; chance decides which blocks of a source are
taken. The chosen blocks are therefore an unbiased sample of their source, and their losses, which
the training step computes anyway, keep the averages up to date.

Shape suffixes: C = candidates, K = chosen, N = blocks observed, M = sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Floats, Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.competition import fidelity, number
from nemo_rod.selection.permutation import derive_key
from nemo_rod.selection.policies import SCORES, Policy, Score, reducible_loss, weigh

# A mean over fewer blocks is too noisy; one over many more lags behind the learning model.
MEMORY_BLOCKS = 8
# Nats. At the base, all replay scores are equal up to rounding errors, which must not matter.
MIN_DEVIATION = 1e-3


@dataclass(eq=False)
class EstimatedScores(Policy):
    """Chooses by another policy, from scores that are mostly estimated.

    The averages are of the last blocks of each source: their mean reducible loss, its variance,
    roughly the number of blocks in them, and the last step that observed the source.
    """

    policy: Policy  # chooses from the scores
    every: int = 0  # steps between two scoring passes; 0: the first step has the only one
    score: Score = field(default=reducible_loss, repr=False)
    needs = SCORES

    def __post_init__(self) -> None:
        self.state = {
            "mean": np.empty(0),
            "variance": np.empty(0),
            "blocks": np.empty(0, dtype=np.int64),
            "seen": np.empty(0, dtype=np.int64),
        }

    def is_due(self, step: int) -> bool:
        """Returns whether a step has a scoring pass: the first one, then one every `every`."""
        return not self._has_seen or (self.every > 0 and step % self.every == 0)

    def weigh(self, pool: Pool, score_C: Floats) -> Floats:
        """Returns the scores as the other policy compares them, [C]."""
        return weigh(self.policy, pool, score_C)

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns the positions that the other policy chooses; see `Policy.select`."""
        return self.policy.select(pool, score_C, k)

    def estimate(self, pool: Pool) -> Nats:
        """Returns a score for every candidate, nats, float32 [C].

        A source with low scores is hardly ever chosen, so a rise would be missed. If the least
        recently observed source was last seen more steps ago than there are sources, one of its
        candidates therefore outranks all others: at most one block per batch.
        """
        mean, seen, source_C = self.state["mean"], self.state["seen"], pool.source_C
        mean = np.where(np.isnan(mean), np.nanmean(mean), mean)
        draws = np.random.default_rng((derive_key(pool.seed, "averages"), pool.step))
        normal_C = draws.standard_normal(len(source_C))
        deviation = np.maximum(np.sqrt(self.state["variance"]), MIN_DEVIATION)
        estimate_C = mean[source_C] + deviation[source_C] * normal_C
        score_C: Nats = estimate_C.astype(np.float32)
        oldest = int(np.argmin(seen[source_C]))
        if pool.step - seen[source_C[oldest]] > len(mean):
            score_C[oldest] = np.nextafter(score_C.max(), np.float32(np.inf))
        return score_C

    def metrics(self, choice: Choice) -> dict[str, float | None]:
        """Returns how well the estimates would have chosen at a step with a scoring pass."""
        if choice.is_estimated or not self._has_seen:  # not before the first update
            return {}
        values = fidelity(choice, self.estimate(choice.pool), self.policy)
        return {f"rod/averages/{name}": number(value) for name, value in values.items()}

    def observe(self, choice: Choice, loss_K: Nats) -> None:
        """Updates the averages with the scores of an unbiased sample of each source's blocks.

        These are all candidates of a scoring pass, or else the blocks that were trained on.
        Scores that are not finite are ignored.
        """
        pool, chosen = choice.pool, choice.chosen
        if not len(self.state["mean"]):
            num_sources = len(pool.sources)
            self.state = {
                "mean": np.full(num_sources, np.nan),
                "variance": np.zeros(num_sources),
                "blocks": np.zeros(num_sources, dtype=np.int64),
                "seen": np.full(num_sources, -1),
            }
        if choice.is_estimated:
            assert choice.reference is not None
            source_N = pool.source_C[chosen]
            rho_N = np.asarray(self.score(loss_K, choice.reference[chosen]))
        else:
            assert choice.score is not None
            source_N, rho_N = pool.source_C, choice.score
        known_N = np.isfinite(rho_N)
        self._add(pool.step, source_N[known_N], rho_N[known_N].astype(np.float64))

    def _add(self, step: int, source_N: Ids, rho_N: npt.NDArray[np.float64]) -> None:
        mean, variance, blocks, seen = self.state.values()
        for source in np.unique(source_N):
            new = rho_N[source_N == source]
            blocks[source] = min(blocks[source], MEMORY_BLOCKS) + len(new)
            weight = len(new) / blocks[source]
            before = new.mean() if np.isnan(mean[source]) else mean[source]
            mean[source] = before + weight * (new.mean() - before)
            spread = ((new - mean[source]) ** 2).mean()
            variance[source] += weight * (spread - variance[source])
            seen[source] = step

    @property
    def _has_seen(self) -> bool:
        return bool(self.state["blocks"].any())
