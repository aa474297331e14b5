"""Records every step of a training run: its curriculum and its metrics.

A step is recorded as soon as it is chosen, and the disk write overlaps with its update. A run that
is killed meanwhile leaves the record of an incomplete step, and drops it when it resumes.
The metrics of a step are written as soon as it has completed, before any checkpoint and
asynchronously with the next step. A resumed run needs them, among others for convergence, and
refuses to continue without them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_rod.files import interpreting, read_json, read_lines, sync, write_whole, writing
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.competition import all_metrics
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.held_out import START_FILE, over_sources


class Journal:
    """The `curriculum.rod` and `metrics.jsonl` of a run, opened at its next step.

    Args:
        folder: folder of both files; it must exist.
        header: the curriculum's header.
        step: step at which the run starts or resumes; records and metrics of it and of later steps
            are dropped, as is a torn last line.

    Raises:
        ValueError: the curriculum has a different header, or one of the files ends before this
            step.
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
        with interpreting(self._metrics):
            rows = [row for row in read_rows(self._metrics) if row["step"] < step]
            last = max((row["step"] for row in rows), default=-1)
        if step > self._curriculum.header.first_step and last != step - 1:
            end = f"ends with step {last}" if rows else "has no earlier step"
            resume = f"resume from a checkpoint of step {last + 1} or before, or " if rows else ""
            raise ValueError(
                f"{self._metrics} {end}, but the run has come to step {step} and continues from "
                f"the metrics of step {step - 1}: restore the file from a copy, or {resume}remove "
                "the checkpoints to begin again"
            )
        if self._metrics.exists():
            write_whole(self._metrics, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._writes: list[Future[None]] = []  # the last step's metrics, and this step's choice

    def begin(self, choice: Choice) -> None:
        """Records the choice of the next step, without waiting for the disk.

        A pending choice is recorded by `append`, together with the losses of its blocks.

        Raises:
            OSError: the write failed, e.g. on a full disk; the curriculum is unchanged.
        """
        if choice.is_pending:
            return
        self._curriculum.append(choice)
        self._writes.append(self._disk.submit(self._curriculum.sync))

    def append(self, step: int, choice: Choice, metrics: dict[str, Any]) -> dict[str, Any]:
        """Records the metrics of a completed step, and its choice unless `begin` did.

        The record is on disk when this returns, hence before a checkpoint can name the step. The
        metrics are written asynchronously, and the next call waits for them.

        Args:
            step: the step.
            choice: its choice.
            metrics: JSON values, with `timing/train/total` [s]; the rest is `update` if not given.

        Returns:
            The step's row of metrics, including those of the choice.

        Raises:
            OSError: a disk write failed, of this step or of the metrics of the one before.
        """
        if step == self._curriculum.next_step:
            self.begin(choice)
        assert step == self._curriculum.next_step - 1, step
        for write in self._writes:
            write.result()
        begin = self._metrics.with_name(START_FILE)
        is_validated = any(name.startswith("validation/") for name in metrics)
        start = read_json(begin) if is_validated and begin.exists() else {}
        row = step_row(step, choice, metrics, self._curriculum.header, start)
        with writing(self._metrics), open(self._metrics, "a") as file:
            file.write(json.dumps(row) + "\n")
            descriptor = os.dup(file.fileno())
        self._writes = [self._disk.submit(_sync_and_close, descriptor, self._metrics)]
        return row


def step_row(
    step: int,
    choice: Choice,
    metrics: dict[str, Any],
    header: CurriculumHeader,
    start: Mapping[str, float],
) -> dict[str, Any]:
    """Returns a step's metrics, see `append`; `start`: held-out losses before the first step."""
    source_C = header.source_index(choice.pool.block_ids)
    total = metrics["timing/train/total"]
    timing = {**choice.seconds, "update": total - sum(choice.seconds.values())}
    metrics = {**{f"timing/train/{part}": value for part, value in timing.items()}, **metrics}
    return {
        "step": step,
        **metrics,
        **over_sources(metrics, start, header.sources),
        # cost of selection, in plain steps
        "rod/overhead": total / metrics["timing/train/update"] - 1,
        "throughput/tokens_per_second": header.num_chosen * header.block_size / total,
        **all_metrics(choice, source_C, [row.name for row in header.sources]),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of all steps in a `metrics.jsonl`; empty if there is no file."""
    return read_lines(path, "step") if path.exists() else []


def _sync_and_close(descriptor: int, path: Path) -> None:
    """Waits until an open file, and its entry in its folder, are on disk; closes the file."""
    try:
        with writing(path):
            os.fsync(descriptor)
            sync(path.parent)
    finally:
        os.close(descriptor)
