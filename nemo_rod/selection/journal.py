"""What a training run writes down after every step: its curriculum and its metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.selection.curriculum import Curriculum
from nemo_rod.selection.curriculum_header import CurriculumHeader
from nemo_rod.selection.selector import Choice


class Journal:
    """`curriculum.rod` and `metrics.jsonl` of a run, opened at the step that is next.

    Args:
        folder: Where both files are; it must exist.
        header: The curriculum's header.
        step: Step that the run goes on with; what was written of it and later is dropped.

    Raises:
        ValueError: A curriculum that was recorded with something else, or that ends earlier.
    """

    def __init__(self, folder: Path, header: CurriculumHeader, *, step: int) -> None:
        path = folder / "curriculum.rod"
        if path.exists():
            self._curriculum = Curriculum.open(path, expect=header, resume_at=step)
        else:
            self._curriculum = Curriculum.create(path, header)
        self._metrics = folder / "metrics.jsonl"
        _keep_lines(self._metrics, step)

    def append(self, step: int, choice: Choice, metrics: dict[str, Any]) -> dict[str, Any]:
        """Writes one step down; returns its line of metrics, those of the choice included.

        Args:
            step: The step that just ended.
            choice: What it trained on.
            metrics: Whatever else is known of it; JSON values.
        """
        self._curriculum.append(
            step, choice.pool, choice.loss, choice.score, choice.chosen, choice.threshold
        )
        row = {"step": step, **metrics, **choice_metrics(choice, self._curriculum.header)}
        with open(self._metrics, "a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def choice_metrics(choice: Choice, header: CurriculumHeader) -> dict[str, float | None]:
    """Returns the `rod/` metrics of a step: shares, mean scores, threshold."""
    names = [row.name for row in header.sources]
    source = header.source_index(choice.block_ids)
    share = np.bincount(source, minlength=len(names)) / len(source)
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
        **{f"rod/share/{name}": float(part) for name, part in zip(names, share, strict=True)},
    }


def number(value: Any) -> float | None:
    """A float, or None (JSON has no NaN) for what is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _keep_lines(path: Path, count: int) -> None:
    """Drops the metrics of steps that will be done again."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")][:count]
    path.write_text("".join(whole))
