"""The stage of the report: tables, figures, page and verdict, over all seeds."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rod.config import section
from nemo_rod.lab.block_text import block_texts
from nemo_rod.lab.controls import FOLDER
from nemo_rod.lab.report.build_report import build_report
from nemo_rod.lab.report.completions import complete
from nemo_rod.lab.report.figures.picture import refuse_undrawn
from nemo_rod.lab.report.model_card import write_model_cards
from nemo_rod.lab.report.section import Report, has_controls
from nemo_rod.lab.report.under_way import has_begun
from nemo_rod.lab.report.verdict import text_of
from nemo_rod.run.handover import Stage
from nemo_rod.run.stages import Stages


def report_stages(stages: Stages) -> list[Stage]:
    """Returns the stage of the report; it is cheap and always runs, because seeds may be new."""
    report = stages.results.path / "report"

    def run() -> None:
        results, page = build(stages), report / "index.html"
        if not results:
            print(f"No arm is evaluated yet: see {page}.")
            return
        write_model_cards(stages.config, results)
        if section(stages.config, Report).smoke_test:
            print(
                f"The installation works. {stages.config.recipe} is too small to judge the method "
                f"by: see {page}, and try recipe=toy."
            )
        else:
            print(text_of(results))
        refuse_undrawn(results)

    stage = Stage(
        name="report",
        command="report",
        title=f"report, in {report / 'index.html'}",
        folder=report,
        proof=(report / "index.html",),
        is_done=lambda: False,
        run=run,
        needs=("evaluate", FOLDER) if has_controls(stages.config) else ("evaluate",),
        runs_model=False,
        extra="report",
    )
    return [stage]


def build(stages: Stages) -> dict[str, Any] | None:
    """Writes the report's files; returns its results, or None before any evaluation."""
    run_dir, shown = stages.results.path, section(stages.config, Report)
    for path in (path for depth in ("*", "*/*", "*/*/*") for path in run_dir.glob(depth)):
        if path.is_symlink() and path.lstat().st_uid != os.geteuid():
            raise ValueError(
                f"{path} is a link of another user, who could read of its target what the page "
                "shows: remove it, or make it yourself"
            )
    runs = [run for run in (run_dir, *sorted(run_dir.glob("*seed_*"))) if has_begun(run)]
    if not runs:
        command = stages.results.command("run")
        raise ValueError(f"{run_dir} holds no arm: run `nemo-rod {command}` first.")
    return build_report(
        runs[0],
        recipe=stages.config.recipe,
        replicates=[*runs[1:], *map(Path, shown.seeds)],
        settings=list(map(Path, shown.settings)),
        report_dir=run_dir / "report",
        arms=stages.config.arms,
        texts=partial(block_texts, runs[0] / "blocks"),
        complete=partial(complete, stages),
    )
