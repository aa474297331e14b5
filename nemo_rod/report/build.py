"""Builds `report/` of a run: results, tables, figures, page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.report import figures
from nemo_rod.report.checks import judge, judge_across_seeds
from nemo_rod.report.figures import Canvas, inline_svg, save
from nemo_rod.report.page import caption, render_page
from nemo_rod.report.results import results_of
from nemo_rod.report.run import Run, is_evaluated, read_run
from nemo_rod.report.table import all_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = ("frontier", "replay_share", "scores", "forgetting_profile", "sampling_ratio")


def build_report(
    run_dir: Path,
    *,
    recipe: str | None = None,
    replicates: Sequence[Path] = (),
    report_dir: Path | None = None,
) -> dict[str, Any]:
    """Writes `<run_dir>/report/` from the files of a run and returns its results.

    Writes `results.json`, `tables/*.csv` and `.md`, `figures/*.svg` and `.png`, and `index.html`.
    Any subset of arms will do: what cannot be shown is left out, what cannot be judged says why.

    Args:
        run_dir: The folder `runs/<recipe>` of a run.
        recipe: Its name, if the folder is called otherwise.
        replicates: Folders of further runs of the recipe, with other seeds; blocks and base model
            may be those of `run_dir`. They are only read, and left out while no arm of theirs is
            evaluated; checks are judged on each run and across them.
        report_dir: Where the report goes, if not into the run's folder.

    Returns:
        The content of `results.json`.

    Raises:
        ValueError: If no arm was evaluated, or a file is damaged or disagrees with another.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    run = replace(run, recipe=recipe or run.recipe)
    results = _judged(run)
    results["replicates"] = []
    for folder in map(Path, replicates):
        if folder.is_dir() and not any(map(is_evaluated, folder.glob("arms/*"))):
            results["notes"].append(f"Run {folder.name} has no evaluated arm yet and is left out.")
        else:
            results["replicates"].append(_judged(read_run(folder, shared_dir=run_dir)))
    results["checks_across_seeds"] = judge_across_seeds([results, *results["replicates"]])
    report_dir = report_dir or run_dir / "report"
    for name in ("tables", "figures"):
        # Left-overs of arms that are gone would contradict the rest.
        shutil.rmtree(report_dir / name, ignore_errors=True)
        (report_dir / name).mkdir(parents=True)
    for table in all_tables(results):
        (report_dir / "tables" / f"{table.name}.csv").write_text(table.to_csv(), encoding="utf-8")
        (report_dir / "tables" / f"{table.name}.md").write_text(
            table.to_markdown(), encoding="utf-8"
        )
    pictures = {}
    for name in FIGURES:
        desktop = _draw(name, run, results, Canvas())
        phone = _draw(name, run, results, Canvas(narrow=True))
        if desktop is None or phone is None:
            continue
        save(desktop, report_dir / "figures" / name)
        text = caption(name, results)
        pictures[name] = (
            inline_svg(desktop, f"{name}-wide", text),
            inline_svg(phone, f"{name}-narrow", text),
        )
    _write(report_dir / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    _write(report_dir / "index.html", render_page(results, pictures))
    return results


def _judged(run: Run) -> dict[str, Any]:
    results = results_of(run)
    return results | {"checks": judge(run, results)}


def _draw(name: str, run: Run, results: Mapping[str, Any], canvas: Canvas) -> Figure | None:
    rod = run.arms.get("rod")
    history = rod.history if rod else None
    if name == "frontier":
        return figures.frontier(results, canvas, results["replicates"])
    if name == "forgetting_profile":
        return figures.forgetting_profile(results, canvas)
    if name == "sampling_ratio":
        return figures.sampling_ratio(results, canvas)
    if history is None:
        return None
    if name == "scores":
        return figures.scores(history, canvas)
    return figures.replay_share(history, results["arms"]["rod"]["share_by_decile"], canvas)


def _write(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
