"""Replay on Demand around the trainer's `train_step` (paper, algorithm 1).

selection/selector.py: pool -> block losses -> scores -> top-k
this module:           ordinary forward-backward on the winners
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from megatron.core.utils import get_model_config

from nemo_rod.megatron.batches import batches_of, for_each
from nemo_rod.megatron.scoring.forward_only import patching
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.scoring.scoring_pass import ForwardStep
from nemo_rod.megatron.scoring.training_losses import TrainingLosses
from nemo_rod.ranks import refuse_different_choices
from nemo_rod.selection import Choice, Selector
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.dealing import deal
from nemo_rod.terms import Term


@dataclass(eq=False)
class RoDSelector:
    """Makes a trainer train on the blocks that a `Selector` chooses at every step.

    Example:
        >>> with RoDSelector(Selector.for_arm(arm, store, references), store).installed():
        ...     pretrain(config, forward_step)
    """

    selector: Selector  # chooses the blocks of a step
    store: Blocks  # holds them; see `batches_of`
    _: KW_ONLY
    scoring_micro_batch_size: int = 1  # see `MegatronScorer`; 0: that of training
    scoring_precision: str | None = None  # see `MegatronScorer.precision`
    beat: Callable[[], None] = lambda: None  # called whenever this rank makes progress
    # turns the trainer's forward step into one that scores; by default plain causal modelling does
    scoring_step: Callable[[Callable], ForwardStep] | None = None
    # returns a context in which the trainer keeps state that scoring changes
    around_scoring: Callable[[], AbstractContextManager] = nullcontext
    terms: list[Term] = field(default_factory=list)  # beside the loss
    # called with every choice before it is trained on
    on_choice: Callable[[Choice], object] = lambda choice: None
    # called when a step has ended, with its choice and its duration in seconds
    on_step: Callable[[Choice, float], object] = lambda choice, seconds: None

    def wrap(self, train_step: Callable) -> Callable:
        """Wraps the selector around a trainer's `train_step`; see `around`."""
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            step = call["forward_backward_func"] = self.around(
                call["forward_backward_func"],
                step=call["global_state"].train_state.step,
                groups=call["pg_collection"],
            )
            start = time.perf_counter()
            self.beat()
            result = train_step(**call)
            for term in self.terms:
                term.updated(call["model"], call["optimizer"], call["global_state"])
            choice = step.finish()
            self.beat()
            if choice is not None:
                self.on_step(choice, time.perf_counter() - start)
            return result

        return rod_train_step

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Swaps the selector into Megatron-Bridge's training loop for the duration of a block."""
        from megatron.bridge.training import train as loop  # other hosts do without

        with patching(loop, "train_step", self.wrap(loop.train_step)):
            yield

    def choose(
        self,
        step: int,
        model: list,
        groups: Any,
        micro_batch_size: int,
        forward_step: ForwardStep | None = None,
    ) -> Choice:
        """Chooses the blocks of a step (paper, algorithm 1, up to the update). Collective.

        Args:
            step: number of the training step, from 0.
            model: the model's chunks on this rank.
            groups: Megatron's process groups (`tp`, `pp`, `cp` and `dp`).
            micro_batch_size: blocks in one pass of one replica in training.
            forward_step: see `MegatronScorer`.

        Raises:
            ValueError: a score is not finite and such candidates are not excluded, or the ranks
                have made different choices.
        """
        scorer = MegatronScorer(
            model,
            self.store,
            groups,
            forward_step=forward_step,
            micro_batch_size=self.scoring_micro_batch_size or micro_batch_size,
            length=self.selector.length,
            beat=self.beat,
            precision=self.scoring_precision,
        )
        with self.around_scoring():
            choice = self.selector.choose(step, scorer)
        refuse_different_choices(choice)
        self.on_choice(choice)
        self.beat()
        return choice

    def around(self, schedule: Callable, *, step: int, groups: Any) -> ChosenStep:
        """Returns the replacement for the schedule of one training step.

        Args:
            schedule: the trainer's forward-backward function, called by keyword.
            step: number of the training step, from 0.
            groups: Megatron's process groups (`tp`, `pp`, `cp` and `dp`).
        """
        return ChosenStep(self, schedule, step, groups)


class ChosenStep:
    """A training step on chosen blocks, called with the keyword arguments of its schedule.

    The choice is made where the trainer would run forward-backward: after it has zeroed the
    gradients, because some optimizers share one buffer between gradients and weights. Called again,
    as by a rerun of the same step, it trains on the same winners.
    """

    def __init__(self, rod: RoDSelector, schedule: Callable, step: int, groups: Any) -> None:
        self._rod, self._schedule, self._step, self._groups = rod, schedule, step, groups
        self._choice: Choice | None = None
        # gathers the losses of the blocks that were trained on, if the policy waits for them
        self._losses: Callable[[], np.ndarray] | None = None

    def __call__(self, **options: Any) -> Any:
        """Chooses the blocks, trains on them, and returns the result of the schedule."""
        rod, schedule, groups = self._rod, self._schedule, self._groups
        if options["forward_only"]:
            return schedule(**options)
        model, micro_batch_size = options["model"], options["micro_batch_size"]
        if self._choice is None:
            make = rod.scoring_step
            forward_step = make and make(options["forward_step_func"])
            self._choice = rod.choose(self._step, model, groups, micro_batch_size, forward_step)
        ids, replica = self._choice.block_ids, groups.dp
        shares = deal(ids, micro_batch_size=micro_batch_size, replicas=replica.size())
        own = shares[replica.rank()]
        for term in rod.terms:
            schedule = term.around(schedule, own >= rod.store.num_adaptation)
        read = batches_of(rod.store)(own, micro_batch_size, checked=True)
        batches = for_each(read, len(model))
        options["data_iterator"] = batches if len(batches) > 1 else batches[0]
        if self._choice.is_pending:
            capture_losses = TrainingLosses(options["forward_step_func"], groups)
            result = schedule(**{**options, "forward_step_func": capture_losses.forward_step})
            if self._losses is None:  # not in a rerun of the same step
                num_blocks = len(self._choice.block_ids)
                self._losses = partial(capture_losses.gather, num_blocks, micro_batch_size)
            return result
        if self._choice.loss is None:
            return schedule(**options)
        # scoring has gathered every parameter; the buffer may have been zeroed since
        with patching(get_model_config(model[0]), "param_sync_func", None):
            return schedule(**options)

    def finish(self) -> Choice | None:
        """Returns the choice after the update; None if the trainer has not run the schedule.

        The policy has then observed its losses. Fetching those of the update waits for the backward
        pass: the optimizer's work comes first.
        """
        if self._choice is None:
            return None
        losses = None if self._losses is None else self._losses()
        return self._rod.selector.learn(self._choice, losses)
