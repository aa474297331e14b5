"""Steers kappa during training; see nemo_rod/selection/kappa_controller.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.bridge.training.callbacks import Callback, CallbackContext

from nemo_rod.files import read_json, write_json
from nemo_rod.megatron.callbacks.validation import Validation
from nemo_rod.megatron.ranks import from_recorder, is_recorder
from nemo_rod.megatron.rod_selector import RoDSelector
from nemo_rod.selection.curriculum.journal import read_rows
from nemo_rod.selection.kappa_controller import Steering, held_out_replay


@dataclass(eq=False)
class SteeredKappa(Callback):
    """Sets the selector's kappa at every step.

    Attributes:
        steering: the rule that kappa follows.
        selector: the selector whose policy is adjusted.
        validation: callback that measures the held-out losses; called before this one. Its folder
            has `metrics.jsonl`, opened before this callback, and `held_out_base.json`, the base's
            held-out losses on replay by source.
        metrics: `rod/kappa` of the current step.
    """

    steering: Steering
    selector: RoDSelector
    validation: Validation
    base: dict[str, float] = field(default_factory=dict, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Resumes from the metrics of the completed steps. Collective."""
        if self.steering.quantity == "forgetting":
            self.base = self._base_losses(context)
        rows = from_recorder(lambda: read_rows(self.validation.folder / "metrics.jsonl"))
        self._set(self.steering.resumed(rows, self.base))

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Updates kappa from the step's outcome, after the recorder has written the old value."""
        choice = self.selector.choice
        assert choice is not None
        share = float(choice.pool.is_replay[choice.chosen].mean())
        row = {"rod/replay_share": share, **self.validation.metrics}
        found = self.steering.found(row, self.base)
        self._set(self.steering.next_kappa(self.metrics["rod/kappa"], found))

    def _base_losses(self, context: CallbackContext) -> dict[str, float]:
        """Returns the initial weights' held-out losses, which are kept in a file."""
        file = self.validation.folder / "held_out_base.json"
        if context.state.train_state.step:
            return from_recorder(lambda: read_json(file))
        losses = held_out_replay(self.validation.metrics)
        if is_recorder():
            write_json(file, losses)
        return losses

    def _set(self, kappa: float) -> None:
        self.metrics = {"rod/kappa": kappa}
        self.selector.set_kappa(kappa)
