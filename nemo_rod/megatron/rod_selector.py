"""Replay on Demand around the trainer's `train_step` (paper, algorithm 1).

selection/selector.py: pool -> block losses -> scores -> top-k
this module:           ordinary forward-backward on the winners
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from megatron.bridge.training import train as loop
from megatron.core.utils import get_model_config

from nemo_rod.corpus.store import BlockStore
from nemo_rod.megatron.batches import Batch, checked_micro_batches, for_each
from nemo_rod.megatron.callbacks.training_losses import TrainingLosses
from nemo_rod.megatron.ranks import refuse_different_choices
from nemo_rod.megatron.scoring.forward_only import replaced
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.megatron.scoring.scoring_pass import ForwardStep
from nemo_rod.selection import Choice, Selector
from nemo_rod.selection.blocks import HashedBlocks
from nemo_rod.selection.dealing import deal


class RoDSelector:
    """Makes a trainer train on the blocks that a `Selector` chooses at every step.

    Example:
        >>> with RoDSelector(Selector.for_arm(arm, store, references), store).installed():
        ...     pretrain(config, forward_step)

    Args:
        selector: chooses the blocks of a step.
        store: store that holds the blocks.
        scoring_micro_batch_size: blocks in one forward-only pass of one replica; 0 for as many
            as in training.
        scoring_precision: "fp8" scores in FP8, None in the model's precision.
        beat: heartbeat, called whenever this rank makes progress.
        batches: function from block ids and a micro-batch size to the micro-batches to score, and
        checked_batches: to those to train on, of blocks that were compared with their hashes; by
            default the `micro_batches` of a `BlockStore`.
        scoring_step: function that turns the trainer's forward step into one that scores; by
            default plain causal language modelling scores.
        around_scoring: returns a context in which the trainer keeps state that scoring changes.

    Attributes:
        choice: the choice of the last step.
        on_choice: callback for every choice, called before it is trained on.
        step_seconds: duration of the last step in seconds.
    """

    def __init__(
        self,
        selector: Selector,
        store: BlockStore | HashedBlocks,
        *,
        scoring_micro_batch_size: int = 1,
        scoring_precision: str | None = None,
        beat: Callable[[], None] = lambda: None,
        batches: Callable[[np.ndarray, int], Iterator[Batch]] | None = None,
        checked_batches: Callable[[np.ndarray, int], Iterator[Batch]] | None = None,
        scoring_step: Callable[[Callable], ForwardStep] | None = None,
        around_scoring: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.selector, self.store, self.batches = selector, store, batches
        if checked_batches is None:
            assert isinstance(store, BlockStore), "other blocks come with their batches"
            checked_batches = partial(checked_micro_batches, store)
        self.checked_batches = checked_batches
        self.scoring_step, self.around_scoring = scoring_step, around_scoring
        self.scoring_micro_batch_size, self.beat = scoring_micro_batch_size, beat
        self.scoring_precision = scoring_precision
        self.choice: Choice | None = None
        self.on_choice: Callable[[Choice], None] = lambda choice: None
        self.step_seconds = 0.0
        self._captured: Callable[[], np.ndarray] | None = None

    def wrap(self, train_step: Callable) -> Callable:
        """Wraps the selector around a trainer's `train_step`.

        The choice is made where the trainer would run forward-backward: after it has zeroed the
        gradients, because some optimizers share one buffer between gradients and weights.
        """
        signature = inspect.signature(train_step)

        def rod_train_step(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            call["forward_backward_func"] = self.around(
                call["forward_backward_func"],
                step=call["global_state"].train_state.step,
                groups=call["pg_collection"],
            )
            start = time.perf_counter()
            self.beat()
            self._captured = None
            result = train_step(**call)
            if self._captured is not None and self.choice is not None:
                # fetching the losses waits for the backward pass: the optimizer's work comes first
                self.choice = self.selector.learn(self.choice, self._captured())
            self.beat()
            self.step_seconds = time.perf_counter() - start
            return result

        return rod_train_step

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Swaps the selector into Megatron-Bridge's training loop for the duration of a block."""
        train_step, loop.train_step = loop.train_step, self.wrap(loop.train_step)
        try:
            yield
        finally:
            loop.train_step = train_step

    def around(self, schedule: Callable, *, step: int, groups: Any) -> Callable:
        """Returns the replacement for the schedule of one training step.

        Args:
            schedule: the trainer's forward-backward function, called by keyword. It runs after
                gradients are zeroed, because some optimizers share one buffer between gradients
                and weights.
            step: number of the training step, from 0.
            groups: Megatron's process groups (`tp`, `pp`, `cp` and `dp`).

        Returns:
            A function with the schedule's keyword arguments and result. Called again, as by a
            rerun of the same step, it trains on the same winners.
        """
        choice: Choice | None = None

        def on_winners(**options: Any) -> Any:
            nonlocal choice
            if options["forward_only"]:
                return schedule(**options)
            model, micro_batch_size = options["model"], options["micro_batch_size"]
            if choice is None:  # a rerun of the same step trains on the same winners
                make = self.scoring_step
                scorer = MegatronScorer(
                    model,
                    self.store,
                    groups,
                    batches=self.batches,
                    forward_step=make and make(options["forward_step_func"]),
                    micro_batch_size=self.scoring_micro_batch_size or micro_batch_size,
                    length=self.selector.length,
                    beat=self.beat,
                    precision=self.scoring_precision,
                )
                with self.around_scoring():
                    choice = self.choice = self.selector.choose(step, scorer)
                refuse_different_choices(choice)
                self.on_choice(choice)
                self.beat()
            shares = deal(
                choice.block_ids, micro_batch_size=micro_batch_size, replicas=groups.dp.size()
            )
            winners = self.checked_batches(shares[groups.dp.rank()], micro_batch_size)
            batches = for_each(winners, len(model))
            options["data_iterator"] = batches if len(batches) > 1 else batches[0]
            if not self.selector.policy.needs_scores:
                return schedule(**options)
            if choice.is_estimated:
                capture_losses = TrainingLosses(options["forward_step_func"], groups)
                result = schedule(**{**options, "forward_step_func": capture_losses.forward_step})
                if self._captured is None:  # not in a rerun of the same step
                    num_blocks = len(choice.block_ids)
                    self._captured = partial(capture_losses.gathered, num_blocks, micro_batch_size)
                return result
            # scoring has gathered every parameter; gathering again would read a buffer that the
            # optimizer may share with gradients and that has since been zeroed
            with replaced(get_model_config(model[0]), "param_sync_func", None):
                return schedule(**options)

        return on_winners
