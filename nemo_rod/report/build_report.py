"""Builds `report/` of a run: results, tables, figures and page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.files import interpreting, write_whole
from nemo_rod.report import figures
from nemo_rod.report.arm_names import parse_arm
from nemo_rod.report.cheaper import cheaper_table
from nemo_rod.report.explorer import Texts, explore, render_explorer
from nemo_rod.report.figures import Canvas, Training, inline_svg, save
from nemo_rod.report.page import render_page, render_under_way
from nemo_rod.report.paper import title_of
from nemo_rod.report.paper_tables import PAPER_TABLES
from nemo_rod.report.results import results_of
from nemo_rod.report.run_files import Run, is_evaluated, read_run
from nemo_rod.report.table import TABLES
from nemo_rod.report.under_way import Part, has_begun, parts_of
from nemo_rod.report.verdicts import judge, judge_across_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
Shown = tuple[Run, Results]


def build_report(
    run_dir: Path,
    *,
    recipe: str | None = None,
    replicates: Sequence[Path] = (),
    settings: Sequence[Path] = (),
    report_dir: Path | None = None,
    arms: Sequence[str] = (),
    texts: Texts | None = None,
) -> dict[str, Any] | None:
    """Writes `<run_dir>/report/` from the files of a run and returns its results.

    Writes `results.json`, `tables/*.csv` and `.md`, `figures/*.svg` and `.png`, `index.html`, and
    `curriculum.html` of a curriculum with scores. Any subset of arms works: figures without data
    are left out, and checks that cannot be judged say why. Of a run without an evaluated arm, the
    pages alone are written.

    Args:
        run_dir: Folder `runs/<recipe>` of a run.
        recipe: Name of the recipe, if the folder has another one.
        replicates: Folders of further runs of the recipe, with other seeds; blocks and base model
            may be those of `run_dir`. They are only read, and left out until an arm of theirs is
            evaluated; checks are judged on each run and across them.
        settings: Folders of runs of other recipes, shown beside this one. They are only read.
        report_dir: Folder of the report, if not in the run's folder.
        arms: Names of the arms that the recipe asks for; the page says which are missing.
        texts: Returns the texts of blocks, by the digest of their store and their ids, for the
            curriculum explorer.

    Returns:
        Content of `results.json`; None if no arm was evaluated.

    Raises:
        ValueError: If the run has not begun, or a file is damaged.
    """
    run_dir = Path(run_dir)
    out, parts = report_dir or run_dir / "report", parts_of(run_dir, arms)
    name = recipe or run_dir.resolve().name
    is_evaluated_yet = any(map(is_evaluated, run_dir.glob("arms/*")))
    if is_evaluated_yet or not has_begun(run_dir):
        run = replace(read_run(run_dir), recipe=name)
    explorer = write_explorer(run_dir, out, recipe=name, texts=texts)
    if not is_evaluated_yet:
        _write_under_way(out, name, parts, explorer=explorer)
        return None
    results = judged(run)
    results["replicates"] = []
    for folder in map(Path, replicates):
        if folder.is_dir() and not any(map(is_evaluated, folder.glob("arms/*"))):
            results["notes"].append(f"Run {folder.name} has no evaluated arm yet and is left out.")
        else:
            results["replicates"].append(judged(read_run(folder, shared_dir=run_dir)))
    results["checks_across_seeds"] = judge_across_seeds([results, *results["replicates"]])
    others = [(other, judged(other)) for other in map(read_run, map(Path, settings))]
    results["settings"] = [judged for _, judged in others]
    _write(out, results, [(run, results), *others], parts, explorer=explorer)
    return results


def write_explorer(run_dir: Path, out: Path, *, recipe: str, texts: Texts | None) -> bool:
    """Writes `curriculum.html` of RoD's curriculum, or of another arm with scores, if there is one.

    Returns:
        Whether there is one.
    """
    found = {path.parent.name: path for path in run_dir.glob("arms/*/curriculum.rod")}
    names = sorted(found, key=lambda name: ("rod" not in name, len(name), name))
    for name in (name for name in names if ".replaced-" not in name):
        note = ""
        try:
            data = explore(found[name], texts)
        except ValueError as error:
            data, note = explore(found[name]), f"There are no texts here: {error}"
        if data is not None:
            arm = name.removesuffix(".partial")
            page = render_explorer(data, recipe=recipe, arm=parse_arm(arm).label, note=note)
            write_whole(out / "curriculum.html", page.encode())
            return True
    (out / "curriculum.html").unlink(missing_ok=True)
    return False


def _write_under_way(out: Path, recipe: str, parts: Sequence[Part], *, explorer: bool) -> None:
    pages = [figures.under_way(parts, Canvas(narrow=narrow)) for narrow in (False, True)]
    wide, narrow = pages
    figure = None
    if wide and narrow:
        figure = inline_svg(wide, "under_way-wide"), inline_svg(narrow, "under_way-narrow")
    page = render_under_way(recipe, parts, figure, explorer=explorer)
    write_whole(out / "index.html", page.encode())


def _write(
    report_dir: Path,
    results: Results,
    shown: Sequence[Shown],
    parts: Sequence[Part],
    *,
    explorer: bool,
) -> None:
    """Writes tables, figures, results and the page."""
    for name in ("tables", "figures"):
        # Stale files of removed arms would contradict the rest.
        shutil.rmtree(report_dir / name, ignore_errors=True)
        (report_dir / name).mkdir(parents=True)
    tables = [make(results) for make in (*TABLES, *PAPER_TABLES, cheaper_table)]
    for table in (table for table in tables if table.rows):
        stem = report_dir / "tables" / table.name
        stem.with_suffix(".csv").write_text(table.to_csv(), encoding="utf-8")
        stem.with_suffix(".md").write_text(table.to_markdown(), encoding="utf-8")
    pictures = {}
    for name in FIGURES:
        # Drawn twice: one width scaled to a phone is illegible there, and scrolled sideways it
        # hides the labels, which end the lines on the right.
        desktop = _draw(name, shown, parts, Canvas())
        phone = _draw(name, shown, parts, Canvas(narrow=True))
        if desktop and phone:
            save(desktop, report_dir / "figures" / name)
            svgs = inline_svg(desktop, f"{name}-wide"), inline_svg(phone, f"{name}-narrow")
            pictures[name] = svgs
    text = json.dumps(results, indent=2, allow_nan=False) + "\n"
    write_whole(report_dir / "results.json", text.encode())
    write_whole(
        report_dir / "index.html", render_page(results, pictures, parts, explorer=explorer).encode()
    )


def judged(run: Run) -> dict[str, Any]:
    """Returns the results of a run with its verdicts.

    Raises:
        ValueError: a file holds what no run writes.
    """
    with interpreting(run.folder, besides=(ValueError,)):
        results = results_of(run)
        return results | {"checks": judge(run, results)}


def _draw(
    name: str, shown: Sequence[Shown], parts: Sequence[Part], canvas: Canvas
) -> Figure | None:
    """Returns a figure by its name: of the run, or of it and all other settings."""
    if name == "under_way":
        return figures.under_way(parts, canvas)
    if name in _OF_RUN:
        return _OF_RUN[name](shown[0][1], canvas)
    if not name.startswith("settings_"):
        shown = shown[:1]
    elif len(shown) < 2:
        return None
    draw = _OF_SETTINGS[name.removeprefix("settings_")]
    is_of_training = draw in (figures.replay_share, figures.scores)
    return draw(_training(shown) if is_of_training else [row[1] for row in shown], canvas)


def _training(shown: Sequence[Shown]) -> list[Training]:
    """Returns the runs of RoD among settings."""
    runs = []
    for run, results in shown:
        rod = run.arms.get("rod")
        if rod and rod.history:
            share = results["arms"]["rod"]["share_by_decile"]
            num_adaptation = sum(run.block_counts["adaptation"].values())
            heading = title_of(results["recipe"]) if len(shown) > 1 else ""
            runs.append(Training(rod.history, share, num_adaptation, heading))
    return runs


Draw = Callable[[Any, Canvas], "Figure | None"]
_OF_RUN: dict[str, Draw] = {
    "frontier": figures.frontier,
    "capabilities": figures.capabilities,
    "components": figures.components,
    "pool_size": figures.pool_size,
    "weighting": figures.weighting,
    "budgets": figures.budgets,
    "transfer": figures.transfer,
    "seeds": figures.seeds,
}
_OF_SETTINGS: dict[str, Draw] = {
    "frontier": figures.settings_frontier,
    "replay_share": figures.replay_share,
    "scores": figures.scores,
    "forgetting_profile": figures.forgetting_profile,
    "sampling_ratio": figures.sampling_ratio,
}
# Titles, captions and order are the page's (`page.html`).
FIGURES = (
    *{**_OF_RUN, **_OF_SETTINGS, **{f"settings_{name}": None for name in _OF_SETTINGS}},
    "under_way",
)
