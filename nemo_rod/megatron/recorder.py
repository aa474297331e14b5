"""Writes down what a training run does: metrics, the curriculum, and progress."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from nemo_rod.megatron.metrics_file import append_line, keep_steps
from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.megatron.selector import RoDSelector
from nemo_rod.megatron.validation import Validation
from nemo_rod.progress import Progress
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, selection_metrics


class Recorder(Callback):
    """Appends one line of metrics and one record of the curriculum after every step.

    Args:
        folder: gets `metrics.jsonl` and `curriculum.rod`.
        selector: whose choices are recorded.
        validation: whose held-out losses are recorded.
        header: the curriculum's header: sizes, digests, seed and sources.
        steps: steps of the whole run, for the progress line.
        name: of the run, for the progress line.
    """

    def __init__(
        self,
        folder: Path,
        selector: RoDSelector,
        validation: Validation,
        *,
        header: CurriculumHeader,
        steps: int,
        name: str,
    ) -> None:
        self.folder, self.selector, self.validation = folder, selector, validation
        self.header = header
        self.progress = Progress(name, steps)
        self.curriculum: Curriculum | None = None
        self.lr = math.nan

    def on_train_start(self, context: CallbackContext) -> None:
        """Opens the files at the step training starts from, dropping what came after it."""
        if not is_recorder():
            return
        step = context.state.train_state.step
        path = self.folder / "curriculum.rod"
        if path.exists():
            self.curriculum = Curriculum.open(path, expect=self.header, resume_at=step)
        else:
            self.curriculum = Curriculum.create(path, self.header)
        keep_steps(self.folder / "metrics.jsonl", step)
        self.progress.start(step)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Notes the learning rate of this step, which the trainer moves on before the step ends."""
        self.lr = next(group["lr"] for group in context.optimizer.param_groups if group)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Records the step that just ended."""
        if not is_recorder():
            return
        assert self.curriculum is not None and self.selector.choice is not None
        choice = self.selector.choice
        # the step counter moves after this callback, so it still names the step that ran
        step = context.state.train_state.step
        self.curriculum.append(
            step, choice.pool, choice.loss, choice.score, choice.chosen, choice.threshold
        )
        row = {"step": step, **self._training(context), **self._selection(choice)}
        row |= self.validation.metrics
        append_line(self.folder / "metrics.jsonl", row)
        note = f"loss {row['train/loss'] or math.nan:.3f}  replay {row['rod/replay_share']:.0%}"
        self.progress.step(step + 1, note)

    def _training(self, context: CallbackContext) -> dict[str, float | None]:
        loss = (context.loss_dict or {}).get("lm loss")
        seconds = self.selector.step_seconds
        parts = self.selector.choice.seconds if self.selector.choice else {}
        timing = {**parts, "update": seconds - sum(parts.values()), "total": seconds}
        return {
            "train/loss": _number(loss),
            "train/grad_norm": _number(context.grad_norm),
            "train/lr": self.lr,
            **{f"timing/train/{part}": value for part, value in timing.items()},
        }

    def _selection(self, choice: Choice) -> dict[str, float | None]:
        store = self.selector.store
        source = store.source_index(choice.block_ids)
        return selection_metrics(choice, source, [s.name for s in store.sources])


def _number(value: Any) -> float | None:
    """A float, or None (JSON has no NaN) for what is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
