"""The record of a swapped-in selector: the curriculum, and a line of metrics per step."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from nemo_rod.files import interpreting, sync
from nemo_rod.hosts.swap_in.blend import Blend
from nemo_rod.megatron.ranks import all_or_none, is_recorder, peak_memory
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, selection_metrics
from nemo_rod.selection.curriculum.header import refuse_foreign
from nemo_rod.selection.curriculum.journal import append_line, keep_steps, read_rows


class ChoiceRecord:
    """Appends every choice to `curriculum.rod` and its metrics to `metrics.jsonl`, on one rank.

    A job that resumes continues both files. One that begins again, at their first step or before,
    as without a checkpoint, moves them aside (`curriculum.rod.1`): they may be of another run.

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
        # from the choice before to this one, as the host ends its steps itself
        before, self.last_choice = self.last_choice, time.perf_counter()
        if before is not None:
            num_tokens = len(choice.chosen) * self.block_size
            metrics["throughput/tokens_per_second"] = num_tokens / (self.last_choice - before)
        metrics |= peak_memory()
        step = choice.pool.step
        if self.curriculum is not None:
            self.curriculum.append(choice)
        if self.folder is not None:
            append_line(self.folder / "metrics.jsonl", {"step": step, **metrics})
        return metrics

    def _open(self, step: int) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path, metrics = self.folder / "curriculum.rod", self.folder / "metrics.jsonl"
        header = self.header
        with interpreting(metrics):
            first_steps = [int(row["step"]) for row in read_rows(metrics)[:1]]
        if path.exists():
            with Curriculum.open(path, read_only=True) as before:
                if header is not None:
                    header = replace(header, first_step=before.header.first_step)
                    refuse_foreign(path, before.header, header)
                first_steps += [before.header.first_step] if len(before) else []
        if first_steps and min(first_steps) >= step:
            _move_aside([path, metrics], step)
        keep_steps(metrics, step)
        if header is not None and path.exists():
            self.curriculum = Curriculum.open(path, expect=header, resume_at=step)
        elif header is not None:
            self.curriculum = Curriculum.create(path, replace(header, first_step=step))


def _move_aside(files: list[Path], step: int) -> None:
    """Renames files durably, by the first number that is free for all of them, and prints them."""
    present = [file for file in files if file.exists()]
    suffixes = (f".{number}" for number in count(1))
    suffix = next(s for s in suffixes if not any(Path(f"{file}{s}").exists() for file in files))
    for file in present:
        os.replace(file, file.with_name(file.name + suffix))
    sync(files[0].parent)
    names = " and ".join(file.name + suffix for file in present)
    print(
        f"nemo-rod: the job begins at step {step} without the steps recorded in "
        f"{files[0].parent}, which are now in {names}; load the checkpoint to continue them.",
        file=sys.stderr,
        flush=True,
    )
