"""State of the parts of a run, finished or not, from its folder.

blocks/ base/ references/<name>/     complete parts; <name>.partial while in progress
arms/<arm>[.partial]/metrics.jsonl   steps done
arms/<arm>/evaluation.json           the arm is part of the report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rod.files import interpreting, read_json
from nemo_rod.lab.metrics import Metrics, read_metrics
from nemo_rod.lab.report.run_files import arm_folders, is_evaluated
from nemo_rod.run.stage_log import StageLog
from nemo_rod.selection.arm_names import parse_arm


@dataclass(frozen=True)
class Part:
    """One product of a run."""

    name: str  # name of the arm, "base", or the name of its folder
    label: str  # its name for readers
    # as of `nemo-rod status`: "done", "running", "stopped", "failed" or "to do"; "trained" for a
    # model whose evaluation is to do
    state: str
    done: int | None = None  # steps done; None if it has no training, or that has not begun
    steps: int | None = None  # all steps; None if unknown
    metrics: Metrics = field(default_factory=Metrics)  # metrics of the steps done
    # held-out losses before the first step; empty if unknown
    start: dict[str, float] = field(default_factory=dict)

    @property
    def progress(self) -> float | None:
        """Share of the steps done, in [0, 1]; None if unknown."""
        return min(1.0, self.done / self.steps) if self.done is not None and self.steps else None

    @property
    def last(self) -> str:
        """The last metrics, in words."""
        shown: tuple[tuple[str, str, str], ...]
        shown = (("loss", "train/loss", "{:.3f}"), ("replay", "rod/replay_share", "{:.0%}"))
        if self.name == "base":  # all of its pretraining counts as replay
            shown = shown[:1]
        known = ((name, self.metrics.last(key), form) for name, key, form in shown)
        return ", ".join(f"{name} {form.format(v)}" for name, v, form in known if v is not None)


def parts_of(run_dir: Path, arms: Sequence[str] = ()) -> list[Part]:
    """Returns blocks, base, references and arms of a run, in the order in which they are made.

    Arms of the folder are added to those of the recipe, `arms`; if any is given, the others serve
    only these, and are done without an evaluation.
    """
    begun, references = (
        {folder.name.removesuffix(".partial") for folder in folders}
        for folders in (arm_folders(run_dir), run_dir.glob("references/*"))
    )
    names = [parse_arm(name) for name in {*arms, *begun} - {"base"}]
    places: list[tuple[str, str, Path | None]]  # folder, label, and that of the evaluation
    places = [("blocks", "blocks", None), ("base", "base", run_dir / "arms" / "base")]
    places += [(f"references/{n}", f"reference losses, {n}", None) for n in sorted(references)]
    for each in sorted(names, key=lambda arm: arm.order):
        places.append((f"arms/{each.name}", each.label, run_dir / "arms" / each.name))
    evaluated, parts = {"base", *(arms or begun)}, []
    for place, label, arm in places:
        folder, name = run_dir / place, Path(place).name
        partial = folder.with_name(folder.name + ".partial")
        if arm and is_evaluated(arm):
            state = "done"
        elif folder.is_dir():
            state = "trained" if arm and name in evaluated else "done"
        elif partial.is_dir():
            stage = "prepare" if place == "blocks" else place.removeprefix("arms/")
            log, folder = StageLog(run_dir, stage.replace("/", "_")), partial
            ends = [] if log.is_held() else [event["event"] for event in log.events()[-1:]]
            state = ends[0] if ends in (["stopped"], ["failed"]) else "running"
        else:
            state = "to do"
        files = ("metrics.jsonl", "job.json", "validation_start.json")
        metrics, job, start = (folder / file for file in files)
        read, steps, before, done = Metrics(), None, {}, None
        if metrics.is_file():
            with interpreting(metrics):
                read = read_metrics(metrics)
            config = read_json(job).get("config", {}) if job.is_file() else {}
            steps, done = config.get("train", {}).get("steps"), len(read)
            before = read_json(start) if start.is_file() else {}
        parts.append(Part(name, label, state, done, steps, read, before))
    return parts


def has_begun(run_dir: Path) -> bool:
    """Returns whether a run's folder has any part, finished or not."""
    return any(part.state != "to do" for part in parts_of(run_dir))
