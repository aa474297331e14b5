"""Ends a run once its adaptation loss has converged and the learning rate has decayed."""

from __future__ import annotations

from megatron.bridge.training.callbacks import Callback, CallbackContext

from nemo_rod.corpus.store import BlockStore
from nemo_rod.megatron.callbacks.validation import Validation
from nemo_rod.megatron.ranks import from_recorder
from nemo_rod.selection.convergence import Rule, adaptation_loss
from nemo_rod.selection.curriculum.journal import read_rows


class UntilConverged(Callback):
    """Brings the end of the schedule forward, from the maximum to half an epoch after convergence.

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
        self.weights = {s.name: s.count for s in store.sources if s.role == "adaptation"}
        self.losses: list[tuple[int, float]] = []

    def on_train_start(self, context: CallbackContext) -> None:
        """Reads the losses of the completed steps. Collective."""
        self.losses = from_recorder(self._recorded)
        self._set_end(context)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Adds the validation of the step that just ended, if there was one."""
        loss = adaptation_loss(self.validation.metrics, self.weights)
        if loss is not None:
            # the counter moves after this callback
            self.losses.append((context.state.train_state.step + 1, loss))
            self._set_end(context)

    def _recorded(self) -> list[tuple[int, float]]:
        rows = read_rows(self.validation.folder / "metrics.jsonl")
        losses = [(row["step"] + 1, adaptation_loss(row, self.weights)) for row in rows]
        return [(done, loss) for done, loss in losses if loss is not None]

    def _set_end(self, context: CallbackContext) -> None:
        """Moves the last step, and with it the decay, whose length stays the same."""
        converged = self.rule.converged_at(self.losses)
        end = self.steps if converged is None else converged + self.rule.decay_steps
        end = min(self.steps, end)
        train, scheduler = context.state.cfg.train, context.scheduler
        if scheduler is None or end == train.train_iters:
            return
        train.train_iters = end
        scheduler.lr_decay_steps = end * train.global_batch_size
        scheduler.step(0)  # the learning rate of the next step
