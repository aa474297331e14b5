"""The record of a swapped-in selector: the curriculum, and a line of metrics per step."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

from nemo_rod.files import interpreting, sync
from nemo_rod.megatron.ranks import all_or_none, is_recorder, peak_memory
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, selection_metrics
from nemo_rod.selection.curriculum.header import refuse_foreign
from nemo_rod.selection.curriculum.journal import append_line, keep_steps, read_rows

# what changes if a job goes on longer or with other batches: its record has a new segment then
_GROWS = ("num_candidates", "num_chosen", "store", "references", "sources")


class ChoiceRecord:
    """Appends every choice to `curriculum.rod` and its metrics to `metrics.jsonl`, on one rank.

    A job that resumes continues both files. One that begins again, at their first step or before,
    as without a checkpoint, moves them aside (`curriculum.rod.1`): they may be of another run.
    One that goes on longer, or with other batch sizes, keeps the curriculum so far in the same way,
    and begins a new one.

    Args:
        folder: folder of both files; None to write nothing.
        header: the curriculum's header.
    """

    def __init__(self, folder: Path | None, header: CurriculumHeader) -> None:
        self.folder, self.header = folder, header
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

    def __call__(self, choice: Choice) -> dict[str, float | None]:
        """Records one step; returns its metrics on the recording rank, an empty dict elsewhere."""
        if not is_recorder():
            return {}
        source_C = self.header.source_index(choice.pool.block_ids)
        names = [row.name for row in self.header.sources]
        metrics = selection_metrics(choice, source_C, names)
        metrics |= {f"timing/train/{part}": value for part, value in choice.seconds.items()}
        # from the choice before to this one, as the host ends its steps itself
        before, self.last_choice = self.last_choice, time.perf_counter()
        if before is not None:
            num_tokens = len(choice.chosen) * self.header.block_size
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
        is_segment = False
        if path.exists():
            with Curriculum.open(path, read_only=True) as before:
                first = before.header.first_step
                header = replace(header, first_step=first)
                grown = {key: getattr(before.header, key) for key in _GROWS}
                refuse_foreign(path, before.header, replace(header, **grown))
                is_segment = before.header != header
                first_steps += [first] if len(before) else []
        if first_steps and min(first_steps) >= step:
            _move_aside([path, metrics], f"begins at step {step} without the steps recorded")
        elif is_segment:
            Curriculum.open(path, resume_at=step).close()  # drops the steps that are done again
            _move_aside([path], f"continues at step {step} with other data than recorded")
        keep_steps(metrics, step)
        if path.exists():
            self.curriculum = Curriculum.open(path, expect=header, resume_at=step)
        else:
            self.curriculum = Curriculum.create(path, replace(header, first_step=step))


def _move_aside(files: list[Path], reason: str) -> None:
    """Renames files durably, by the first number that is free for all of them, and prints them."""
    present = [file for file in files if file.exists()]
    suffixes = (f".{number}" for number in count(1))
    suffix = next(s for s in suffixes if not any(Path(f"{file}{s}").exists() for file in files))
    for file in present:
        os.replace(file, file.with_name(file.name + suffix))
    sync(files[0].parent)
    names = " and ".join(file.name + suffix for file in present)
    print(
        f"nemo-rod: the job {reason} in {files[0].parent}: the earlier record is now in {names}.",
        file=sys.stderr,
        flush=True,
    )
