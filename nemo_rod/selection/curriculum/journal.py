"""What a training run writes down of every step: its curriculum and its metrics.

A step is written down as soon as it is chosen, and the disk has the time of its update to take the
record. A run that is killed meanwhile leaves the record of a step that never ended, and drops it
when it goes on.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_rod.selection.choice import Choice, selection_metrics
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum


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
        elif step > 0:
            raise ValueError(
                f"{path} is missing, but the run has come to step {step}: bring it back, or remove "
                f"the checkpoints to begin again."
            )
        else:
            self._curriculum = Curriculum.create(path, header)
        self._metrics = folder / "metrics.jsonl"
        keep_steps(self._metrics, step)
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._begun: Future[None] | None = None

    def begin(self, choice: Choice) -> None:
        """Writes down what the next step trains on, and does not wait for the disk.

        Raises:
            OSError: The disk is full, or the like; the curriculum is as before.
        """
        self._curriculum.append(choice, sync=False)
        self._begun = self._disk.submit(self._curriculum.sync)

    def append(self, step: int, choice: Choice, metrics: dict[str, Any]) -> dict[str, Any]:
        """Writes the rest of a step down, and its choice unless that was done when it began.

        Its record is on the disk before this returns, so before a checkpoint can name the step.

        Args:
            step: The step that just ended.
            choice: What it trained on.
            metrics: Seconds of the step, `timing/train/total` and `timing/train/update`, and
                whatever else is known of it; JSON values.

        Returns:
            Its line of metrics, those of the choice included.

        Raises:
            OSError: The disk did not take what was written.
        """
        if self._begun is None:
            self.begin(choice)
        assert self._begun is not None and step == self._curriculum.next_step - 1, step
        self._begun.result()
        self._begun = None
        header = self._curriculum.header
        source = header.source_index(choice.block_ids)
        names = [row.name for row in header.sources]
        total, update = (metrics[f"timing/train/{part}"] for part in ("total", "update"))
        # what choosing adds to a plain step, as a share of that
        overhead = {"rod/overhead": total / update - 1}
        row = {"step": step, **metrics, **overhead, **selection_metrics(choice, source, names)}
        append_line(self._metrics, row)
        return row


def number(value: Any) -> float | None:
    """A float, or None (JSON has no NaN) for what is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Adds the metrics of a step to a file of one JSON object per line."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The metrics of every step in a file that `append_line` wrote; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_steps(path: Path, end: int) -> None:
    """Drops the metrics of step `end` and later, which will be done again, and a torn last line."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < end]
    path.write_text("".join(whole))
