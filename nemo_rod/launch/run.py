"""What each command does: it runs stages in order, skipping what is done."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.launch import handover
from nemo_rod.launch.evaluate import evaluate_arms
from nemo_rod.launch.handover import Stage
from nemo_rod.launch.stages import Stages
from nemo_rod.selection.arms import arm_kind


@contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Keeps a second command out of a run folder while one works in it.

    Raises:
        ValueError: if another process is at work there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another nemo-rod is at work in {run_dir}: wait for it to end, or choose another "
                "run_dir."
            ) from None
        yield


def run(config: Config) -> None:
    """Every stage of the recipe, then evaluation and report."""
    stages = Stages(config)
    _run_stages(config, stages.all(), then=["evaluate", "report"])
    if not config.dry_run:
        evaluate(config)
        report(config)


def prepare(config: Config) -> None:
    """Text -> blocks."""
    _run_stages(config, [Stages(config).prepare()])


def pretrain(config: Config) -> None:
    """The base model."""
    _run_stages(config, [Stages(config).make_base()])


def score(config: Config) -> None:
    """Reference losses: of the base on replay and of the specialist on adaptation."""
    stages = Stages(config)
    _run_stages(config, [stages.reference("base"), stages.reference("specialist")])


def train(config: Config) -> None:
    """One arm, or every trained arm of the recipe."""
    stages = Stages(config)
    names = _arms(config, "trained")
    _run_stages(config, [stages.train(name) for name in names])


def merge(config: Config) -> None:
    """One merged arm, or every one of the recipe."""
    stages = Stages(config)
    _run_stages(config, [stages.merge(name) for name in _arms(config, "merged")])


def evaluate(config: Config) -> None:
    """Held-out losses of every arm that has none yet."""
    names = ["base", *(name for name in _arms(config) if name != "base")]
    start = time.monotonic()
    done = evaluate_arms(Stages(config), names)
    what = f"{len(done)} arms in {time.monotonic() - start:.0f} s" if done else "done before"
    _say(f"evaluate: {what}")


def report(config: Config) -> None:
    """Tables, figures, the page and the verdicts, over all seeds of a sweep."""
    from nemo_rod.report import build_report, format_checks

    folder = Path(config.run_dir)
    runs = [run for run in (folder, *sorted(folder.glob("*seed_*"))) if (run / "arms").is_dir()]
    if not runs:
        raise ValueError(f"{folder} holds no arm: run `nemo-rod run recipe={config.recipe}` first.")
    report_dir = folder / "report"
    results = build_report(
        runs[0], recipe=config.recipe, replicates=runs[1:], report_dir=report_dir
    )
    print(format_checks(results))
    _say(f"report: {report_dir / 'index.html'}")


def _arms(config: Config, kind: str | None = None) -> list[str]:
    names = [config.arm] if config.arm else config.arms
    found = [name for name in names if kind in (None, arm_kind(name))]
    if not found:
        raise ValueError(
            f"There is no {kind} arm among {names}: name one with arm=... or arms=[...]."
        )
    return found


def _run_stages(config: Config, stages: list[Stage], then: list[str] | None = None) -> None:
    known = [stage.name for stage in Stages(config).all()] + ["evaluate"]
    for name in config.rebuild:
        if name not in known:
            raise ValueError(f"rebuild=[{name}] names no stage: expected some of {known}.")
    total = len(stages) + len(then or [])
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{total}] {stage.title}"
        if config.dry_run:
            state = "done" if (stage.folder / "manifest.json").exists() else "to do"
            _say(f"{label}: {state}  (nemo-rod {stage.command}, {stage.folder})")
            continue
        if handover.is_done(stage, rebuild=stage.name in config.rebuild):
            _say(f"{label}: done before")
            continue
        _say(label)
        start = time.monotonic()
        handover.make(stage)
        _say(f"{label}: {time.monotonic() - start:.0f} s")
    if config.dry_run:
        for number, name in enumerate(then or [], start=len(stages) + 1):
            _say(f"[{number}/{total}] {name}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
