"""The choice of one step (paper, algorithm 1, up to the update), whoever scores and trains.

    pool -> block losses -> scores -> top-k

Shapes: C candidates, K chosen blocks (global).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.candidates import Pools
from nemo_rod.selection.choice import Choice, LossPair, OnNonfinite, choose
from nemo_rod.selection.lowest import ReferenceLosses
from nemo_rod.selection.policies import Policy
from nemo_rod.selection.references import block_loss


class BlockScorer(Protocol):
    """Scores blocks with the current model."""

    def chunk_sums(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the sums of the token losses over eighths of each block, nats [C, 8]."""


class Selector:
    """Chooses what each step trains on.

    Args:
        pools: The candidate pool of every step.
        policy: Turns scores into the chosen blocks.
        batch_size: Blocks trained on in one step (K).
        block_size: Tokens per block (S).
        references: Reference losses; needed if the policy needs scores.
        on_nonfinite: See `choose`.

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
        references: ReferenceLosses | None = None,
        on_nonfinite: OnNonfinite = "refuse",
    ) -> None:
        if policy.needs_scores and references is None:
            raise ValueError(
                f"{type(policy).__name__} chooses by reducible loss: give the reference losses."
            )
        self.pools, self.policy = pools, policy
        self.batch_size, self.block_size, self.references = batch_size, block_size, references
        self.on_nonfinite = on_nonfinite

    def choose(self, step: int, scorer: BlockScorer) -> Choice:
        """Draws, scores and selects: the paper's algorithm 1 up to the update."""
        pool = self.pools.pool(step)

        def losses() -> LossPair:
            assert self.references is not None
            sums = scorer.chunk_sums(pool.block_ids)
            return block_loss(sums, self.block_size), self.references[pool.block_ids]

        return choose(pool, self.policy, self.batch_size, losses, self.on_nonfinite)
