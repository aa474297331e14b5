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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Floats, Ids, Nats
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.competition import fidelity, number
from nemo_rod.selection.permutation import derive_key
from nemo_rod.selection.policies import SCORES, Policy, Score, reducible_loss, weigh

Averages = dict[str, npt.NDArray[Any]]

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
        self.state = no_averages(0)

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
        """Returns a score for every candidate, nats, float32 [C]; see `draw_scores`."""
        mean_M, deviation_M = self.state["mean"], np.sqrt(self.state["variance"])
        mean_M = np.where(np.isnan(mean_M), np.nanmean(mean_M), mean_M)
        return draw_scores(pool, mean_M, deviation_M, self.state["seen"], self.weigh)

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
            self.state = no_averages(len(pool.sources))
        if choice.is_estimated:
            assert choice.reference is not None
            source_N = pool.source_C[chosen]
            rho_N = np.asarray(self.score(loss_K, choice.reference[chosen]))
        else:
            assert choice.score is not None
            source_N, rho_N = pool.source_C, choice.score
        known_N = np.isfinite(rho_N)
        add_blocks(self.state, pool.step, source_N[known_N], rho_N[known_N].astype(np.float64))

    @property
    def _has_seen(self) -> bool:
        return bool(self.state["blocks"].any())


def no_averages(num_sources: int) -> Averages:
    """Returns the averages of sources of which no block was observed."""
    return {
        "mean": np.full(num_sources, np.nan),
        "variance": np.zeros(num_sources),
        "blocks": np.zeros(num_sources, dtype=np.int64),
        "seen": np.full(num_sources, -1),
    }


def add_blocks(
    averages: Averages,
    step: int,
    source_N: Ids,
    value_N: npt.NDArray[np.float64],
    memory_M: Ids | None = None,
) -> None:
    """Brings averages up to date with finite values, in nats, of the blocks of a step.

    Each is roughly over as many blocks as a source's memory has.
    """
    mean, variance, blocks, seen = (averages[name] for name in no_averages(0))
    for source in np.unique(source_N):
        new = value_N[source_N == source]
        memory = MEMORY_BLOCKS if memory_M is None else memory_M[source]
        blocks[source] = min(blocks[source], memory) + len(new)
        weight = len(new) / blocks[source]
        before = new.mean() if np.isnan(mean[source]) else mean[source]
        mean[source] = before + weight * (new.mean() - before)
        spread = ((new - mean[source]) ** 2).mean()
        variance[source] += weight * (spread - variance[source])
        seen[source] = step


def draw_scores(
    pool: Pool,
    mean_M: Floats,
    deviation_M: Floats,
    seen_M: Ids,
    weigh: Callable[[Pool, Floats], Floats],
) -> Nats:
    """Returns a random score for every candidate, nats, float32 [C], by its source.

    A source with low scores is hardly ever chosen, so a rise would be missed. If some
    source has gone unobserved for more steps than there are sources, one of its candidates
    therefore outranks all others after weighing: at most one block per batch.
    """
    source_C = pool.source_C
    draws = np.random.default_rng((derive_key(pool.seed, "averages"), pool.step))
    deviation_C = np.maximum(deviation_M, MIN_DEVIATION)[source_C]
    estimate_C = mean_M[source_C] + deviation_C * draws.standard_normal(len(source_C))
    score_C: Nats = estimate_C.astype(np.float32)
    oldest = int(np.argmin(seen_M[source_C]))
    if pool.step - seen_M[source_C[oldest]] > len(mean_M):
        highest = max(float(weigh(pool, score_C).max()), float(score_C.max()), MIN_DEVIATION)
        score_C[oldest] = np.nextafter(np.float32(highest), np.float32(np.inf))
        if 0 < (weighed := float(weigh(pool, score_C)[oldest])) < highest:
            score_C[oldest] *= 1.001 * highest / weighed
    return score_C
