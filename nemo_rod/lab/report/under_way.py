"""State of the parts of a run, finished or not, from its folder.

blocks/ base/ references/<name>/     complete parts; <name>.partial while in progress
arms/<arm>[.partial]/metrics.jsonl   steps done
arms/<arm>/evaluation.json           the arm is part of the report
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rod.files import interpreting, read_json
from nemo_rod.lab.metrics import Metrics, read_metrics
from nemo_rod.run.stage_log import StageLog
from nemo_rod.selection.arm_names import parse_arm
from nemo_rod.selection.held_out import START_FILE


@dataclass(frozen=True)
class Part:
    """One product of a run, or a job."""

    name: str  # name of the arm, "base", or the name of its folder
    label: str = ""  # its name for readers
    # as of `nemo-rod status`: "done", "running", "stopped", "failed" or "to do"; "trained" for a
    # model whose evaluation is to do
    state: str = "done"
    steps: int | None = None  # all steps; None if unknown
    metrics: Metrics = field(default_factory=Metrics)  # metrics of the steps done
    # held-out losses before the first step; empty if unknown
    start: Mapping[str, float] = field(default_factory=dict)

    @property
    def done(self) -> int | None:
        """Steps done; None if it has no training, or that has not begun."""
        return int(self.metrics.step_T[-1]) + 1 if len(self.metrics) else None

    @property
    def last(self) -> str:
        """The last metrics, in words."""
        shown = {"loss": "train/loss", "replay": "rod/replay_share", "lr": "train/lr"}
        if self.name == "base":  # all of its pretraining counts as replay
            del shown["replay"]
        known = ((name, self.metrics.last(key)) for name, key in shown.items())
        return "  ".join(f"{name} {value:.3g}" for name, value in known if value is not None)


def read_part(folder: Path, name: str, label: str = "", state: str = "done") -> Part:
    """Returns a part with what its training, if it has any, has recorded in a folder.

    Raises:
        ValueError: a file is damaged.
    """
    job, metrics, start = (folder / f for f in ("job.json", "metrics.jsonl", START_FILE))
    if not metrics.is_file():
        return Part(name, label, state)
    about = read_json(job) if job.is_file() else {}
    with interpreting(job):  # of an arm of a run, or of a job in another trainer
        steps = about["config"]["train"]["steps"] if "config" in about else about.get("steps")
        if steps is not None and (steps := int(steps)) < 1:
            raise ValueError(f"it has steps={steps}")
    with interpreting(metrics):
        read = read_metrics(metrics)
    return Part(name, label, state, steps, read, read_json(start) if start.is_file() else {})


def arm_folders(run_dir: Path) -> list[Path]:
    """Returns the folders of a run's arms, without those that `rebuild` has moved aside.

    What a file manager or an editor leaves there is none.
    """
    found = (path for path in run_dir.glob("arms/*") if path.is_dir())
    return [path for path in found if path.name[0] != "." and ".replaced-" not in path.name]


def is_evaluated(arm_dir: Path) -> bool:
    """Returns whether an arm's folder holds held-out losses."""
    return (arm_dir / "evaluation.json").is_file()


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
        parts.append(read_part(folder, name, label, state))
    return parts


def has_begun(run_dir: Path) -> bool:
    """Returns whether a run's folder has any part, finished or not."""
    made = (run_dir / f"{name}{end}" for name in ("blocks", "base") for end in ("", ".partial"))
    return any(map(Path.is_dir, [*made, *run_dir.glob("references/*"), *arm_folders(run_dir)]))
