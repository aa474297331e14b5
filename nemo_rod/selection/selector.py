"""The choice of one step (paper, algorithm 1, up to the update), independent of the trainer.

    pool -> block losses -> scores -> top-k

After the update, `learn` hands the losses of the blocks to a policy that observes them.

Shapes: C candidates, K chosen blocks (global).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nemo_rod.files import read_lines
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.candidates import Pool, Pools
from nemo_rod.selection.choice import Choice, OnNonfinite, ask, choose, policy_metrics
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.policies import (
    Policy,
    Score,
    keeps_state,
    needs_of,
    observes,
    reducible_loss,
    reference_roles,
)
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

    A policy that learns is copied, so that it begins with the state of the one that is given.

    Raises:
        ValueError: the policy or the score is none, needs references and there are none, or is for
            other sources.
    """

    pools: Pools
    policy: Policy
    store: Blocks  # the candidates' store, which knows their sources
    batch_size: int  # blocks trained on in one step (K)
    references: References | None = None
    # scored tokens of a candidate, from its start; by default those of the references, or else all
    length: int | None = None
    on_nonfinite: OnNonfinite = "refuse"  # see `choose`
    score: Score = reducible_loss
    seed: int = 0  # policies that draw at random use it
    steps: int = 0  # steps of the whole run, for policies that look ahead; 0: unknown

    def __post_init__(self) -> None:
        self._compared = reference_roles(needs_of(self.policy, self.score))
        if self._compared and self.references is None:
            raise ValueError(
                f"{type(self.policy).__name__} compares losses of {' and '.join(self._compared)} "
                "with reference losses: give them."
            )
        if self.references and self.length is None:
            self.length = self.references.length
        if hasattr(self.policy, "check_sources"):
            self.policy.check_sources(self.store.sources)
        self._given, self._has_chosen = self.policy, False
        self._begin()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._ahead: dict[int, Future[tuple[Pool, Nats | None]]] = {}  # the step that is next

    @classmethod
    def for_arm(
        cls,
        arm: Arm,
        store: Blocks,
        references: References | None = None,
        on_nonfinite: OnNonfinite = "refuse",
        steps: int = 0,
    ) -> Selector:
        """Returns the selector of an arm over a store, in a run of some steps.

        Raises:
            ValueError: the recorded curriculum is missing or of another store, or the references
                are missing.
        """
        return cls(
            pools=arm.pools(store),
            policy=arm.policy(),
            store=store,
            batch_size=arm.batch_size,
            references=references,
            length=arm.scored_length(store.block_size),
            on_nonfinite=on_nonfinite,
            score=arm.score(),
            seed=arm.seed,
            steps=steps,
        )

    def choose(self, step: int, scorer: BlockScorer) -> Choice:
        """Draws, scores and selects: the paper's algorithm 1 up to the update.

        The call is collective if the scorer's is.

        Raises:
            ValueError: see `choose`; or what is asked for the first time answers otherwise again.
        """
        start = time.perf_counter()
        drawn = self._ahead.get(step)
        pool, reference_C = self._draw(step) if drawn is None else drawn.result()
        self._ahead = {step + 1: self._thread.submit(self._draw, step + 1)}  # may never run
        loss_C, seconds = None, dict[str, float]()
        if "losses" in self.policy.needs:
            looked_up = time.perf_counter()
            loss_C = scorer.losses(pool.block_ids)
            seconds = {"lookup": looked_up - start, "scoring": time.perf_counter() - looked_up}
        given = (self.batch_size, loss_C, reference_C, self.on_nonfinite, self.score)
        choice = choose(pool, self.policy, *given)
        if not self._has_chosen:  # once, as it may be a stranger's
            again, self._has_chosen = choose(pool, self.policy, *given), True
            same = np.array_equal(choice.score, again.score)  # type: ignore[arg-type]
            if not (same and np.array_equal(choice.chosen, again.chosen)):
                raise ValueError(
                    f"step {step}: {type(self.policy).__name__} or its score answers otherwise "
                    "when asked again, so that no run could resume: change nothing in it, and draw "
                    "at random by np.random.default_rng((pool.seed, pool.step))."
                )
        return replace(
            choice,
            seconds=seconds | choice.seconds,
            is_pending=loss_C is None and observes(self.policy),
            metrics=policy_metrics(self.policy, choice),
        )

    def learn(self, choice: Choice, loss_K: Nats | None = None) -> Choice:
        """Hands the losses of a step that has been trained on to its policy, if that observes them.

        Args:
            choice: the choice of that step.
            loss_K: losses of the chosen blocks, from the forward pass of the update, nats per
                token, float32 [K]; needed if the choice is pending.

        Returns:
            The choice, with these losses if it was pending; NaN for candidates not chosen.
        """
        if choice.is_pending:
            assert loss_K is not None, "a pending choice without losses"
            loss_C = np.full(len(choice.pool.block_ids), np.nan, dtype=np.float32)
            loss_C[choice.chosen] = loss_K
            choice = replace(choice, loss=loss_C, is_pending=False)
        if observes(self.policy):
            assert choice.loss is not None
            observe = self.policy.observe  # type: ignore[attr-defined]
            ask(observe, choice.pool.step, choice, choice.loss[choice.chosen])
        return choice

    def tell_policy(self, row: dict[str, Any], shared: Callable[[Callable[[], Any]], Any]) -> None:
        """Hands held-out losses that were measured after a step to its policy, if that needs them.

        Args:
            row: metrics of the step, on the rank that records them.
            shared: see `resume`. Collective.
        """
        if "held_out" in self.policy.needs:
            self._hear(shared(lambda: row))

    def _hear(self, row: dict[str, Any]) -> None:
        if any(name.startswith("validation/") for name in row):
            ask(self.policy.measured, row["step"], row["step"], row)  # type: ignore[attr-defined]

    def resume(
        self,
        step: int,
        find: Callable[[], list[tuple[Path, int]]],
        shared: Callable[[Callable[[], Any]], Any],
    ) -> int:
        """Brings the policy to its state before a step; returns the first step that it is told of.

        Args:
            step: the step that is next, and the result if there is no record.
            find: returns the curricula of the steps before it, in their order, each with the step
                before which it counts; metrics are beside them.
            shared: calls a function on the rank that can read the files, and returns its result on
                all. Collective.
        """
        if not keeps_state(self.policy):
            return 0
        self._begin()
        policy: Any = self.policy

        def read_record() -> Any:
            first = step
            for file, end in find():
                metrics = file.with_name("metrics.jsonl")
                hears = "held_out" in policy.needs and metrics.exists()
                rows = {row["step"]: row for row in read_lines(metrics, "step")} if hears else {}
                with Curriculum.open(file, read_only=True) as curriculum:
                    for record in curriculum:
                        if record.step >= end:
                            break
                        first = min(first, record.step)
                        is_replay_C = curriculum.header.is_replay(record.block_ids)
                        drawn = Pool(record.step, record.block_ids, is_replay_C)
                        pool = drawn.of(self.store, self.seed, self.steps)
                        has_scores = not np.isnan(record.threshold)
                        score_C = record.score if has_scores else None
                        choice = Choice(
                            *(pool, record.loss, score_C, record.chosen, record.threshold),
                            is_estimated=has_scores and bool(np.isnan(record.loss).any()),
                            reference=self._references_of(pool),
                        )
                        self.learn(choice)
                        self._hear(rows.get(record.step, {}))
            return first, policy.state

        first, policy.state = shared(read_record)
        return int(first)

    def _begin(self) -> None:
        """Gives the policy the state of the one that was given."""
        if keeps_state(self._given):
            policy: Any = copy.copy(self._given)
            policy.state = copy.deepcopy(policy.state)
            self.policy = policy

    def _draw(self, step: int) -> tuple[Pool, Nats | None]:
        """Returns the pool of a step, and its reference losses [C] if the policy needs any."""
        pool = self.pools.pool(step).of(self.store, self.seed, self.steps)
        return pool, self._references_of(pool)

    def _references_of(self, pool: Pool) -> Nats | None:
        """Returns the reference losses of a pool [C], NaN of a role that needs none."""
        if not self._compared or self.references is None:
            return None
        if "adaptation" in self._compared:
            return self.references[pool.block_ids]
        reference_C = np.full(len(pool.block_ids), np.nan, dtype=np.float32)
        reference_C[pool.is_replay_C] = self.references[pool.block_ids[pool.is_replay_C]]
        return reference_C
