"""The choice of one step (paper, algorithm 1, up to the update), independent of the trainer.

    pool -> block losses -> scores -> top-k

If scores are estimated between scoring passes (`estimates.py`), `learn` updates the estimates with
the losses of the blocks that were trained on.

Shapes: C candidates, K chosen blocks (global).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from nemo_rod.selection.arms import Arm
from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Pool, Pools
from nemo_rod.selection.choice import Choice, OnNonfinite, choose, choose_by_estimates
from nemo_rod.selection.competition import fidelity, number
from nemo_rod.selection.estimates import SourceAverages
from nemo_rod.selection.policies import Policy, Score, reducible_loss
from nemo_rod.selection.references import References


class BlockScorer(Protocol):
    """Scores blocks with the current model."""

    def losses(self, block_ids: Ids) -> Nats:
        """Returns the losses of blocks over the scored length of the references.

        Nats per token, float32 [C].
        """


@dataclass(eq=False, kw_only=True)
class Selector:
    """Chooses the blocks that each step trains on.

    Raises:
        ValueError: the policy needs scores, but there are no references.
    """

    pools: Pools
    policy: Policy
    batch_size: int  # blocks trained on in one step (K)
    references: References | None = None
    on_nonfinite: OnNonfinite = "refuse"  # see `choose`
    averages: SourceAverages | None = None  # estimates scores between scoring passes
    score: Score = reducible_loss

    def __post_init__(self) -> None:
        if self.policy.needs_scores and self.references is None:
            raise ValueError(
                f"{type(self.policy).__name__} chooses by reducible loss: give the reference "
                "losses."
            )
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._ahead: dict[int, Future[tuple[Pool, Nats | None]]] = {}  # the step that is next

    @classmethod
    def for_arm(
        cls,
        arm: Arm,
        store: Blocks,
        references: References | None = None,
        on_nonfinite: OnNonfinite = "refuse",
    ) -> Selector:
        """Returns the selector of an arm over a store.

        Raises:
            ValueError: the recorded curriculum is missing or of another store, or the references
                are missing.
        """
        averages = None
        if arm.scored_every is not None:
            averages = SourceAverages(
                store.source_index,
                len(store.sources),
                every=arm.scored_every,
                seed=arm.seed,
                score=arm.score(),
            )
        return cls(
            pools=arm.pools(store),
            policy=arm.policy(),
            batch_size=arm.batch_size,
            references=references,
            on_nonfinite=on_nonfinite,
            averages=averages,
            score=arm.score(),
        )

    @property
    def length(self) -> int | None:
        """Scored tokens of a candidate: those of its reference loss; None if none is scored."""
        return self.references.length if self.references and self.policy.needs_scores else None

    def choose(self, step: int, scorer: BlockScorer) -> Choice:
        """Draws, scores and selects: the paper's algorithm 1 up to the update.

        The call is collective if the scorer's is.

        Raises:
            ValueError: a score is not finite, and such candidates are not excluded.
        """
        start = time.perf_counter()
        drawn = self._ahead.get(step)
        pool, reference_C = self._draw(step) if drawn is None else drawn.result()
        self._ahead = {step + 1: self._thread.submit(self._draw, step + 1)}  # may never run
        if not self.policy.needs_scores:
            return choose(pool, self.policy, self.batch_size)
        if self.averages is not None and not self.averages.is_due(step):
            estimate_C = self.averages.estimate(pool)
            return choose_by_estimates(estimate_C, pool, self.policy, self.batch_size)
        looked_up = time.perf_counter()
        loss_C = scorer.losses(pool.block_ids)
        scored = time.perf_counter()
        given = (loss_C, reference_C, self.on_nonfinite, self.score)
        choice = choose(pool, self.policy, self.batch_size, *given)
        compared: dict[str, float | None] = {}
        if self.averages is not None and choice.score is not None:
            if self.averages.has_seen:  # not before the first update
                estimate_C = self.averages.estimate(pool)
                values = fidelity(choice, estimate_C, self.policy)
                compared = {f"rod/averages/{name}": number(n) for name, n in values.items()}
            self.averages.observe(step, pool.block_ids, choice.score)
        seconds = {"lookup": looked_up - start, "scoring": scored - looked_up, **choice.seconds}
        return replace(choice, seconds=seconds, compared=compared)

    def learn(self, choice: Choice, loss_K: Nats) -> Choice:
        """Updates the averages with the training losses of a step chosen by estimated scores.

        Args:
            choice: the choice of that step.
            loss_K: losses of the chosen blocks, from the forward pass of the update, nats per
                token, float32 [K].

        Returns:
            The choice with these losses; NaN for candidates that were not chosen.
        """
        assert self.averages is not None and self.references is not None
        score_K = self.score(loss_K, self.references[choice.block_ids])
        self.averages.observe(choice.pool.step, choice.block_ids, score_K)
        loss_C = np.full(len(choice.pool.block_ids), np.nan, dtype=np.float32)
        loss_C[choice.chosen] = loss_K
        return replace(choice, loss=loss_C)

    def _draw(self, step: int) -> tuple[Pool, Nats | None]:
        """Returns the pool of a step, and its reference losses [C] if it will be scored."""
        pool = self.pools.pool(step)
        # a step that is not due for a scoring pass one step ahead never becomes due
        is_scored = self.averages is None or self.averages.is_due(step)
        if not (self.policy.needs_scores and is_scored and self.references is not None):
            return pool, None
        return pool, self.references[pool.block_ids]
