"""The record of a swapped-in selector: the curriculum, and a line of metrics per step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemo_rod.megatron.ranks import all_or_none, is_recorder, peak_memory
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, selection_metrics
from nemo_rod.selection.curriculum.journal import append_line, keep_steps
from nemo_rod.swap_in.blend import Blend


class ChoiceRecord:
    """Appends every choice to `curriculum.rod` and its metrics to `metrics.jsonl`, on one rank.

    Args:
        folder: folder of both files; None to write nothing.
        blend: the job's training data.
        header: the curriculum's header; None to write no curriculum, as without references
            samples have no ids.
    """

    def __init__(self, folder: Path | None, blend: Blend, header: CurriculumHeader | None) -> None:
        self.folder, self.names = folder, [row.name for row in blend.sources]
        self.header, self.block_size = header, blend.block_size
        self.curriculum: Curriculum | None = None
        self.begun = False
        self.last_choice: float | None = None  # when it was made

    def begin(self, step: int) -> None:
        """Opens the files at the step that training starts from. Collective, in the first call.

        Raises:
            ValueError: the folder belongs to another run; raised on all ranks.
        """
        if not self.begun:
            all_or_none(lambda: self._open(step) if is_recorder() else None)
            self.begun = True

    def __call__(self, choice: Choice, source_C: np.ndarray) -> dict[str, float | None]:
        """Records one step; returns its metrics on the recording rank, an empty dict elsewhere."""
        if not is_recorder():
            return {}
        metrics = selection_metrics(choice, source_C, self.names)
        metrics |= {f"timing/train/{part}": value for part, value in choice.seconds.items()}
        metrics |= {**self._pace(len(choice.chosen)), **peak_memory()}
        step = choice.pool.step
        if self.curriculum is not None:
            self.curriculum.append(choice)
        if self.folder is not None:
            append_line(self.folder / "metrics.jsonl", {"step": step, **metrics})
        return metrics

    def _pace(self, num_chosen: int) -> dict[str, float]:
        """Returns the speed from the choice before to this one: the host ends its steps itself."""
        before, self.last_choice = self.last_choice, time.perf_counter()
        if before is None:
            return {}
        seconds = self.last_choice - before
        return {"throughput/tokens_per_second": num_chosen * self.block_size / seconds}

    def _open(self, step: int) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        keep_steps(self.folder / "metrics.jsonl", step)
        path = self.folder / "curriculum.rod"
        if self.header is not None and path.exists():
            with Curriculum.open(path, read_only=True) as before:
                header = replace(self.header, first_step=before.header.first_step)
            self.curriculum = Curriculum.open(path, expect=header, resume_at=step)
        elif self.header is not None:
            self.curriculum = Curriculum.create(path, replace(self.header, first_step=step))
