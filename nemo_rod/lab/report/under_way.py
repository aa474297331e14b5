"""What a run has so far, and what it lacks: from its folder, finished or not.

blocks/ base/ references/<name>/     what is done; in progress as <name>.partial
arms/<arm>[.partial]/metrics.jsonl   steps done
arms/<arm>/evaluation.json           the arm is part of the report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rod.files import read_json, read_lines
from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.run_files import arm_folders, is_evaluated

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """One thing that the run makes.

    Attributes:
        label: Its name for readers.
        state: "evaluated", "trained", "there", "in progress" or "missing".
        done: Steps done; None if it is not trained, or has not begun.
        steps: Steps of all; None if unknown.
        rows: Metrics of these steps.
        start: Held-out losses before the first step; empty if unknown.
    """

    label: str
    state: str
    done: int | None = None
    steps: int | None = None
    rows: Rows = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)

    @property
    def is_missing(self) -> bool:
        """Whether the report lacks it."""
        return self.state not in ("evaluated", "there")

    @property
    def progress(self) -> float | None:
        """Share of the steps done, in [0, 1]; None if unknown."""
        return min(1.0, self.done / self.steps) if self.done is not None and self.steps else None

    @property
    def last(self) -> str:
        """The last metrics, in words."""
        shown = (("loss", "train/loss", "{:.3f}"), ("replay", "rod/replay_share", "{:.0%}"))
        row = self.rows[-1] if self.rows else {}
        known = ((name, row.get(key), form) for name, key, form in shown)
        return ", ".join(f"{name} {form.format(v)}" for name, v, form in known if v is not None)


def parts_of(run_dir: Path, arms: Sequence[str] = ()) -> list[Part]:
    """Returns blocks, base, references and arms of a run, in the order in which they are made.

    Args:
        run_dir: Folder of the run.
        arms: Names of the arms that the recipe asks for; others that are there are added.
    """
    found = [folder.name.removesuffix(".partial") for folder in arm_folders(run_dir)]
    names = sorted({*arms, *found} - {"base"}, key=lambda name: parse_arm(name).order)
    folders = [run_dir / "arms" / name for name in names]
    references = sorted(
        {folder.name.removesuffix(".partial") for folder in run_dir.glob("references/*")}
    )
    return [
        _part(run_dir / "blocks", "blocks"),
        _part(run_dir / "base", "base", arm=run_dir / "arms" / "base"),
        *(_part(run_dir / "references" / name, f"reference losses, {name}") for name in references),
        *(_part(arm, parse_arm(arm.name).label, arm=arm) for arm in folders),
    ]


def has_begun(run_dir: Path) -> bool:
    """Returns whether a run has left anything in its folder."""
    return any(part.state != "missing" for part in parts_of(run_dir))


def _part(folder: Path, label: str, *, arm: Path | None = None) -> Part:
    """Returns what is in a folder; `arm` is the one that its evaluation is in, if it has one."""
    partial = folder.with_name(folder.name + ".partial")
    if arm and is_evaluated(arm):
        state = "evaluated"
    elif folder.is_dir():
        state = "trained" if arm else "there"
    else:
        state, folder = ("in progress", partial) if partial.is_dir() else ("missing", folder)
    names = ("metrics.jsonl", "job.json", "validation_start.json")
    metrics, job, start = (folder / name for name in names)
    if not metrics.is_file():
        return Part(label, state)
    rows = read_lines(metrics)
    steps = read_json(job).get("optimisation", {}).get("steps") if job.is_file() else None
    before = read_json(start) if start.is_file() else {}
    return Part(label, state, len(rows), steps, rows, before)
