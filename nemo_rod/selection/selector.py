"""The choice of one step (paper, algorithm 1, up to the update), whoever scores and trains.

    pool -> block losses -> scores -> top-k

Shapes: C candidates, K chosen blocks (global).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.candidates import Pool, Pools
from nemo_rod.selection.policies import Policy, reducible_loss, threshold
from nemo_rod.selection.references import References, block_loss


class BlockScorer(Protocol):
    """Scores blocks with the current model."""

    def chunk_sums(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the sums of the token losses over eighths of each block, nats [C, 8]."""


@dataclass(frozen=True)
class Choice:
    """What was chosen at a step, and why.

    Attributes:
        pool: The candidates.
        loss: float32 [C], nats; None where the policy needs no scores.
        score: float32 [C]; None where the policy needs no scores.
        chosen: int64 [K], positions in the pool, ascending.
        threshold: tau, the smallest chosen score; NaN without scores.
        seconds: Of the parts "scoring" and "selection".
    """

    pool: Pool
    loss: npt.NDArray[np.float32] | None
    score: npt.NDArray[np.float32] | None
    chosen: npt.NDArray[np.int64]
    threshold: float
    seconds: dict[str, float]

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        """The chosen blocks, int64 [K]."""
        return self.pool.block_ids[self.chosen]


class Selector:
    """Chooses what each step trains on.

    Args:
        pools: The candidate pool of every step.
        policy: Turns scores into the chosen blocks.
        batch_size: Blocks trained on in one step (K).
        block_size: Tokens per block (S).
        references: Reference losses; needed if the policy needs scores.

    Raises:
        ValueError: A policy that needs scores, and no references.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        policy: Policy,
        batch_size: int,
        block_size: int,
        references: References | None = None,
    ) -> None:
        if policy.needs_scores and references is None:
            raise ValueError(
                f"{type(policy).__name__} chooses by reducible loss: give the reference losses."
            )
        self.pools, self.policy = pools, policy
        self.batch_size, self.block_size, self.references = batch_size, block_size, references

    def choose(self, step: int, scorer: BlockScorer) -> Choice:
        """Draws, scores and selects: the paper's algorithm 1 up to the update."""
        pool = self.pools.pool(step)
        if not self.policy.needs_scores:
            chosen = self.policy.select(None, pool.is_replay, self.batch_size)
            return Choice(pool, None, None, chosen, math.nan, {"scoring": 0.0, "selection": 0.0})
        assert self.references is not None
        start = time.perf_counter()
        loss_C = block_loss(scorer.chunk_sums(pool.block_ids), self.block_size)
        scored = time.perf_counter()
        score_C = reducible_loss(loss_C, self.references[pool.block_ids])
        chosen = self.policy.select(score_C, pool.is_replay, self.batch_size)
        tau = threshold(self.policy.weigh(score_C, pool.is_replay), chosen)
        seconds = {"scoring": scored - start, "selection": time.perf_counter() - scored}
        return Choice(pool, loss_C, score_C, chosen, tau, seconds)
