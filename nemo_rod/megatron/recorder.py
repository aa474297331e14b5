"""Writes down what a training run does: metrics, the curriculum, and progress."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext

from nemo_rod.megatron.selector import Choice, RoDSelector
from nemo_rod.megatron.validation import Validation
from nemo_rod.progress import Progress
from nemo_rod.selection import Curriculum, CurriculumHeader


def is_recorder() -> bool:
    """Whether this rank writes: the last one, which is on the last pipeline stage."""
    return dist.get_rank() == dist.get_world_size() - 1


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
        _keep_lines(self.folder / "metrics.jsonl", step)
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
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
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
        count = np.bincount(source, minlength=len(store.sources)) / len(source)
        is_replay, score = choice.pool.is_replay, choice.score
        means: dict[str, float | None] = {"rod/rho_adaptation": None, "rod/rho_replay": None}
        if score is not None:
            for role, mask in (("adaptation", ~is_replay), ("replay", is_replay)):
                if mask.any():
                    means[f"rod/rho_{role}"] = float(score[mask].mean())
        return {
            "rod/replay_share": float(is_replay[choice.chosen].mean()),
            "rod/threshold": None if score is None else float(choice.threshold),
            **means,
            **{f"rod/share/{s.name}": float(c) for s, c in zip(store.sources, count, strict=True)},
        }


def _number(value: Any) -> float | None:
    """A float, or None (JSON has no NaN) for what is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _keep_lines(path: Path, count: int) -> None:
    """Drops the metrics of steps that will be done again."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")][:count]
    path.write_text("".join(whole))
