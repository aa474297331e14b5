"""Replay on Demand around the trainer's `train_step` (paper, algorithm 1).

selection/selector.py: pool -> block losses -> scores -> top-k
here: ordinary forward-backward on the winners
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.bridge.training import train as loop
from megatron.core.utils import get_model_config

from nemo_rod.corpus.store import BlockStore
from nemo_rod.megatron.batches import micro_batches
from nemo_rod.megatron.callbacks.training_losses import TrainingLosses
from nemo_rod.megatron.ranks import refuse_different_choices
from nemo_rod.megatron.scoring.block_losses import BlockLosses
from nemo_rod.megatron.scoring.distillation import SoftTargets
from nemo_rod.megatron.scoring.forward_only import replaced
from nemo_rod.selection import Choice, OnNonfinite, Policy, Pools, ReferenceLosses, Selector
from nemo_rod.selection.estimates import SourceAverages
from nemo_rod.selection.references import NUM_CHUNKS
from nemo_rod.selection.references.teacher import Teacher


class RoDSelector:
    """Lets a trainer train on what a `Selector` chooses, at every step.

    Args:
        store: the blocks.
        pools: the candidate pool of every step.
        policy: turns scores into the chosen blocks.
        batch_size: blocks trained on in one step (K).
        references: reference losses; needed if the policy needs scores.
        on_nonfinite: what to do with a score that is no number: "refuse" or "exclude".
        scoring_micro_batch_size: blocks in one forward-only pass of one replica.
        eighths: how much of every candidate is scored, from its beginning.
        averages: guess the scores of steps without a scoring pass; None scores at every step.
        teacher: what the base foretells of replay, if that is scored by it; None for losses.
        beat: called whenever this rank got on a bit.

    Attributes:
        choice: of the last step.
        on_choice: called with every choice, before it is trained on.
        step_seconds: of the last step.
    """

    def __init__(
        self,
        *,
        store: BlockStore,
        pools: Pools,
        policy: Policy,
        batch_size: int,
        references: ReferenceLosses | None = None,
        on_nonfinite: OnNonfinite = "refuse",
        scoring_micro_batch_size: int = 1,
        eighths: int = NUM_CHUNKS,
        averages: SourceAverages | None = None,
        teacher: Teacher | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.selector = Selector(
            pools=pools,
            policy=policy,
            batch_size=batch_size,
            block_size=store.block_size,
            references=references,
            on_nonfinite=on_nonfinite,
            eighths=eighths,
            averages=averages,
        )
        self.store, self.teacher = store, teacher
        self.scoring_micro_batch_size, self.beat = scoring_micro_batch_size, beat
        self.choice: Choice | None = None
        self.on_choice: Callable[[Choice], None] = lambda choice: None
        self.step_seconds = 0.0

    def wrap(self, train_step: Callable) -> Callable:
        """Puts the selector around a trainer's `train_step`.

        The choice is made where the trainer would go forward and backward: after it has zeroed
        gradients, because some optimizers share one buffer between gradients and weights.
        """
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            call["forward_backward_func"] = self._on_winners(
                call["forward_backward_func"],
                step=call["global_state"].train_state.step,
                groups=call["pg_collection"],
            )
            start = time.perf_counter()
            self.beat()
            result = train_step(**call)
            self.beat()
            self.step_seconds = time.perf_counter() - start
            return result

        return rod_train_step

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Swaps the selector into Megatron-Bridge's training loop for the time of a block."""
        train_step, loop.train_step = loop.train_step, self.wrap(loop.train_step)
        try:
            yield
        finally:
            loop.train_step = train_step

    def _on_winners(self, schedule: Callable, *, step: int, groups: Any) -> Callable:
        choice: Choice | None = None

        def on_winners(**options: Any) -> Any:
            nonlocal choice
            if options["forward_only"]:
                return schedule(**options)
            model, micro_batch_size = options["model"], options["micro_batch_size"]
            if choice is None:  # a rerun of the same step trains on the same winners
                losses = BlockLosses(
                    model,
                    self.store,
                    groups,
                    micro_batch_size=self.scoring_micro_batch_size,
                    beat=self.beat,
                    targets=SoftTargets(self.teacher, groups.tp) if self.teacher else None,
                )
                choice = self.choice = self.selector.choose(step, losses)
                refuse_different_choices(choice)
                self.on_choice(choice)
                self.beat()
            # whole micro-batches are dealt out, so that none depends on the number of replicas:
            # some losses, such as the routers' balance, are taken over a micro-batch
            by_micro_batch = choice.block_ids.reshape(-1, micro_batch_size)
            mine = by_micro_batch[groups.dp.rank() :: groups.dp.size()].ravel()
            batches = [micro_batches(self.store, mine, micro_batch_size) for _ in model]
            options["data_iterator"] = batches if len(batches) > 1 else batches[0]
            if not self.selector.policy.needs_scores:
                return schedule(**options)
            if choice.is_guess:
                return self._listening(schedule, options, choice, groups)
            # every parameter was gathered for scoring; gathering again would read a buffer that
            # the optimizer may share with gradients and that is zeroed by now
            with replaced(get_model_config(model[0]), "param_sync_func", None):
                return schedule(**options)

        return on_winners

    def _listening(
        self, schedule: Callable, options: dict[str, Any], choice: Choice, groups: Any
    ) -> Any:
        """Runs the schedule on a guess, and lets the selector learn what its blocks cost."""
        heard = TrainingLosses(options["forward_step_func"], groups)
        result = schedule(**{**options, "forward_step_func": heard.forward_step})
        sums = heard.gathered(len(choice.block_ids), options["micro_batch_size"])
        if self.choice is choice:  # not in a rerun of the same step
            self.choice = self.selector.learn(choice, sums)
        return result
