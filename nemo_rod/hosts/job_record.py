"""The record of a job with selection, on any host: its choices and its metrics.

    job.json                 steps of the job, tokens of a sample that are scored, and a digest of
                             its held-out samples
    curriculum.rod           pools, scores and choices
    metrics.jsonl            one line per step that has ended
    validation_start.json    held-out losses of the base, before step 0

Names and forms are those of a trained arm of a recipe. `nemo-rod report FOLDER` shows the job.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from nemo_rod.files import interpreting, read_json, sync, write_json
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Selector
from nemo_rod.selection.curriculum.header import refuse_foreign
from nemo_rod.selection.curriculum.journal import Journal, read_rows, step_row
from nemo_rod.selection.held_out import START_FILE
from nemo_rod.selection.policies import has_scores

# fields that change if a job continues with more steps, other batches or other samples; its record
# then has a new segment
_GROWS = (
    *("num_candidates", "num_chosen", "store", "references", "sources"),
    *("seed", "block_size"),
)


def refuse_nameless(part: Any, setting: str) -> None:
    """Refuses, by a ValueError, an object that a later process could not recognise."""
    if vars(object)["__repr__"] is type(part).__repr__:
        raise ValueError(
            f"{type(part).__name__} has no __repr__, by which a resumed job recognises its "
            f"{setting}: make it a dataclass."
        )


def job_header(selector: Selector, data: Any, *, decided_by: object, seed: int) -> CurriculumHeader:
    """Returns the provenance of a job's curriculum; see `CurriculumHeader`.

    Args:
        selector: the selector.
        data: the blocks.
        decided_by: everything else that affects the choices, by its repr; see `refuse_nameless`.
        seed: of the candidate stream.
    """
    return CurriculumHeader.of(
        data,
        selector.references,
        num_candidates=selector.pools.size,
        num_chosen=selector.batch_size,
        config=repr(decided_by),
        seed=seed,
        scored=has_scores(selector.policy),
    )


class JobRecord:
    """Records every step of a job in its folder, in one process.

    A job that resumes continues its files. If training restarts at or before the first recorded
    step, as without a checkpoint, existing files are kept as `curriculum.rod.1` and so on. If the
    number of steps, a batch size or the samples changed, or steps are missing because the job ran
    without the selector, the old curriculum is renamed in the same way and a new one begins.

    A job that begins behind step 0, as a branch of another, takes the base's losses from that one's
    record: measured now, they would be those of weights that have forgotten already.

    Args:
        folder: the folder; None to write nothing.
        header: the curriculum's header.
        step: the step that training starts from.
        steps: number of steps of the whole job.
        held_out: digest of the held-out samples; "" if no held-out losses are measured.
        scored_length: leading tokens of a sample that are scored; None for all.
        former: folder of the record of the job whose checkpoint was loaded, if it is another one
            and there is such a folder.

    Attributes:
        start: held-out losses of the base, `validation/<role>/<source>/loss` in nats per token;
            empty if they are not known.
        is_new: whether no step was trained before, so that `start` is to be measured now.

    Raises:
        ValueError: the folder belongs to another run.
    """

    def __init__(
        self,
        folder: Path | None,
        header: CurriculumHeader,
        *,
        step: int,
        steps: int,
        held_out: str = "",
        scored_length: int | None = None,
        former: Path | None = None,
    ) -> None:
        self.folder, self.header = folder, header
        self.start: dict[str, float] = {}
        self.is_new = step == 0
        self._journal: Journal | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = ("curriculum.rod", "metrics.jsonl", START_FILE, "job.json")
        path, metrics, start, job = (folder / name for name in names)
        with interpreting(metrics):
            first_steps = [int(row["step"]) for row in read_rows(metrics)[:1]]
        reason = ""  # why a new segment begins
        if path.exists():
            with Curriculum.open(path, read_only=True) as before:
                first = before.header.first_step
                header = replace(header, first_step=first)
                grown = {key: getattr(before.header, key) for key in _GROWS}
                refuse_foreign(path, before.header, replace(header, **grown))
                kept = min(step, first + len(before))
                if before.header != header:
                    reason = " with other data than recorded"
                elif not first <= step == kept:
                    reason = ", which does not follow the steps recorded"
                first_steps += [first] if len(before) else []
        known, base = _start_of(folder, held_out), _start_of(former, held_out)
        # the record of another run than that of the checkpoint, in a folder that both were to use
        is_foreign = step > 0 and base is not None and known not in (None, base)
        begins = not first_steps or min(first_steps) >= step or is_foreign
        if first_steps and begins:
            files = [path, metrics, start]
            _move_aside(files, f"begins at step {step} without the steps recorded")
        elif reason:
            if kept >= first:
                Curriculum.open(path, resume_at=kept).close()  # drops steps that are done again
            _move_aside([path], f"continues at step {step}{reason}")
        recorded = read_json(job, "held_out")["held_out"] if job.exists() else ""
        if start.exists() and begins:
            start.unlink()  # left by an attempt that ended before its first step
        elif start.exists() and held_out and recorded != held_out:
            _move_aside(
                [start], f"continues at step {step} with other held-out samples than recorded"
            )
        if step and held_out and (begins or not recorded):  # else it was said before
            how = "begins" if begins else "continues"
            if base is not None:
                write_json(start, base)
            _say(
                f"{how} at step {step}: its F val counts from the base, by {former}/{START_FILE}."
                if base is not None
                else f"{how} at step {step}, and no record of its first steps has the base's "
                f"losses on these held-out samples ({former or folder}): F val is not stated; to "
                f"have it, copy that record's files to {folder} before the job starts."
            )
        if start.exists():
            self.start = _losses(start)
        facts = {"steps": steps, "held_out": held_out or recorded}
        write_json(job, facts | {"scored_length": scored_length or header.block_size})
        if not path.exists():
            header = replace(header, first_step=step)
            Curriculum.create(path, header).close()
        self.header, self._journal = header, Journal(folder, header, step=step)

    def begin(self, losses: dict[str, float]) -> None:
        """Records the held-out losses of the base."""
        self.start = losses
        if self.folder is not None:
            write_json(self.folder / START_FILE, losses)

    def begin_step(self, choice: Choice) -> None:
        """Records the choice of a step before it is trained on, without waiting for the disk."""
        if self._journal is not None:
            self._journal.begin(choice)

    def end_step(self, choice: Choice, total: float, metrics: dict[str, Any]) -> dict[str, Any]:
        """Records a step that has ended.

        Args:
            choice: its choice.
            total: its duration in seconds, without held-out losses.
            metrics: metrics of the host, and held-out losses if any were measured.

        Returns:
            All metrics of the step; see `held_out.over_sources`.
        """
        metrics = {"timing/train/total": total, **metrics}
        step = choice.pool.step
        if self._journal is None:
            return step_row(step, choice, metrics, self.header, self.start)
        return self._journal.append(step, choice, metrics)


def segments(folder: Path | None, store: str, step: int) -> list[tuple[Path, int]]:
    """Returns the curricula of a job that lead to a step without a gap, each with its end.

    Those with another store than that of this digest say nothing of the blocks that there are now,
    and those with metrics beside them are of another run.
    """
    found, end = list[tuple[Path, int]](), step
    if folder is None:
        return found
    former = [path for path in folder.glob("curriculum.rod.*") if path.suffix[1:].isdecimal()]
    former = [path for path in former if not (folder / f"metrics.jsonl{path.suffix}").exists()]
    former.sort(key=lambda path: -int(path.suffix[1:]))
    for path in (folder / "curriculum.rod", *former):
        if end == 0:
            break
        with Curriculum.open(path, read_only=True) as curriculum:
            header = curriculum.header
            first, stop = header.first_step, header.first_step + len(curriculum)
        if header.store == store and first < end <= stop:
            found, end = [(path, end), *found], first
    return found


def _move_aside(files: list[Path], reason: str) -> None:
    """Renames files durably, by the first number that is free for all of them, and prints them."""
    present = [file for file in files if file.exists()]
    suffixes = (f".{number}" for number in count(1))
    suffix = next(s for s in suffixes if not any(Path(f"{file}{s}").exists() for file in files))
    for file in present:
        os.replace(file, file.with_name(file.name + suffix))
    sync(files[0].parent)
    names = " and ".join(file.name + suffix for file in present)
    _say(f"{reason} in {files[0].parent}: the earlier record is now in {names}.")


def _start_of(folder: Path | None, held_out: str) -> dict[str, float] | None:
    """Returns a record's held-out losses of the base; None if it has none of these samples."""
    files = [folder / name for name in (START_FILE, "job.json")] if folder else []
    if not files or not all(file.is_file() for file in files):
        return None
    job = read_json(files[1])
    return _losses(files[0]) if held_out and job.get("held_out") == held_out else None


def _losses(file: Path) -> dict[str, float]:
    """Reads held-out losses of the base; NaN is one that the base really had."""
    losses = read_json(file)
    for name, loss in losses.items():
        if type(loss) not in (int, float) or loss < 0 or loss == math.inf:
            raise ValueError(
                f"{file} has {name}={loss!r}, expected a loss in nats per token: restore it from a "
                "copy, or remove it, and F val is not stated."
            )
    return losses


def _say(sentence: str) -> None:
    print(f"nemo-rod: the job {sentence}", file=sys.stderr, flush=True)
