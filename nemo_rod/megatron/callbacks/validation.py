"""Held-out losses per source during training, and early stopping by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.pg_utils import get_pg_collection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.megatron.scoring.scorer import MegatronScorer
from nemo_rod.ranks import from_recorder, is_recorder
from nemo_rod.selection.curriculum.journal import read_rows
from nemo_rod.selection.held_out import START_FILE, Rule, adaptation_loss, is_due, source_losses


@dataclass(eq=False)
class Validation(Callback):
    """Measures the loss on a store's first held-out blocks of every source; see `is_due`.

    The losses before the first step are in `validation_start.json` of the run's folder, since
    `metrics.jsonl` has a line per step. All arms are measured on the same blocks.
    """

    store: BlockStore
    folder: Path
    _: KW_ONLY
    every: int  # steps between two validations; 0 for none at all
    num_blocks: int  # maximum number of blocks per source
    micro_batch_size: int
    beat: Callable[[], None] = lambda: None
    # `validation/<role>/<source>/loss` in nats per token after the step that just ended, or of the
    # initial weights before the first; empty if there was no validation
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Scores the held-out blocks with the initial weights, unless the run resumes. Collective.

        A run that was killed before its first checkpoint starts, and measures, again.
        """
        if not self.every or context.state.train_state.step:
            return
        self.metrics = self.measure(context)
        if is_recorder():
            write_json(self.folder / START_FILE, self.metrics)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Scores the held-out blocks if a validation is due. Collective."""
        self.metrics = {}
        done = context.state.train_state.step + 1  # the counter advances after this callback
        if self.every and is_due(done, every=self.every, steps=context.state.cfg.train.train_iters):
            self.metrics = self.measure(context)

    def measure(self, context: CallbackContext) -> dict[str, float]:
        """Scores the held-out blocks with the current weights. Collective."""
        groups, size = get_pg_collection(context.model[0]), self.micro_batch_size
        scorer = MegatronScorer(
            context.model, self.store, groups, micro_batch_size=size, beat=self.beat
        )
        return source_losses(scorer, self.store.sources, num_blocks=self.num_blocks)


class UntilConverged(Callback):
    """Moves the end of the schedule from the maximum to half an epoch after convergence.

    No state is saved: a resumed run reads its earlier losses from its metrics.

    Args:
        rule: the criterion of convergence and the length of the decay.
        validation: callback that measures the losses; called before this one. Its folder has the
            run's metrics, opened before this callback.
        store: the training blocks, for the sizes of the sources.
        steps: maximum number of updates, the decay included.
    """

    def __init__(self, rule: Rule, validation: Validation, store: BlockStore, steps: int) -> None:
        self.rule, self.validation, self.steps = rule, validation, steps
        self.sources = store.sources
        self.losses: list[tuple[int, float]] = []

    def on_train_start(self, context: CallbackContext) -> None:
        """Reads the losses of the completed steps. Collective."""

        def read_losses() -> list[tuple[int, float]]:
            rows = read_rows(self.validation.folder / "metrics.jsonl")
            losses = [(row["step"] + 1, adaptation_loss(row, self.sources)) for row in rows]
            return [(done, loss) for done, loss in losses if loss is not None]

        self.losses = from_recorder(read_losses)
        self._set_end(context)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Adds the validation of the step that just ended, if there was one."""
        loss = adaptation_loss(self.validation.metrics, self.sources)
        if loss is not None:
            # the counter moves after this callback
            self.losses.append((context.state.train_state.step + 1, loss))
            self._set_end(context)

    def _set_end(self, context: CallbackContext) -> None:
        """Moves the last step, and with it the decay, whose length stays the same."""
        done = self.rule.converged_at(self.losses)
        end = self.steps if done is None else min(self.steps, done + self.rule.decay_steps)
        train, scheduler = context.state.cfg.train, context.scheduler
        if scheduler is None or end == train.train_iters:
            return
        train.train_iters = end
        scheduler.lr_decay_steps = end * train.global_batch_size
        scheduler.step(0)  # the learning rate of the next step
