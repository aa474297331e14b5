"""Builds `report/` of a run: results, tables, figures and page."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.files import interpreting, read_json, remove, write_json, write_whole
from nemo_rod.lab.report.explorer import Texts, explore
from nemo_rod.lab.report.figures.drawing import files_of
from nemo_rod.lab.report.figures.picture import pictures_of
from nemo_rod.lab.report.figures.training import curves_of
from nemo_rod.lab.report.page import render, render_page
from nemo_rod.lab.report.provenance import provenance_of
from nemo_rod.lab.report.results import RunResults, results_of
from nemo_rod.lab.report.run_files import Run, as_other_seed, read_run
from nemo_rod.lab.report.table import TABLES
from nemo_rod.lab.report.under_way import Part, arm_folders, has_begun, is_evaluated, parts_of
from nemo_rod.lab.report.verdict import across_seeds, verdict_of
from nemo_rod.selection.arm_names import parse_arm

BLOCK_LOSSES = "held_out_losses.npz"
Completed = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
_OWN = re.compile(
    r"(held_out_losses\.npz|tables/[\w-]+\.(csv|md)|figures/[\w-]+\.(svg|png|vl\.json)|curriculum[\w.-]*\.html)"
)


class Files:
    """The files of a report, none of which is written or removed elsewhere by a link.

    Args:
        out: the report's folder; `files.json` there lists what the next report may remove.
    """

    def __init__(self, out: Path) -> None:
        self.out, self._written = out, list[str]()

    def write(self, name: str, data: str | bytes) -> None:
        """Writes one file."""
        content = data.encode() if isinstance(data, str) else data
        write_whole(self.out / name, content, below=self.out.parent)
        self._written.append(name)

    def finish(self) -> None:
        """Removes the files of an earlier report that this one lacks, such as of removed arms."""
        listing = self.out / "files.json"
        earlier = read_json(listing).get("files") if listing.is_file() else None
        for name in earlier if isinstance(earlier, list) else ():
            if isinstance(name, str) and _OWN.fullmatch(name) and name not in self._written:
                remove(self.out / name, below=self.out.parent)
        own = sorted(filter(_OWN.fullmatch, self._written))
        write_json(listing, {"files": own}, below=self.out.parent)


def build_report(
    run_dir: Path,
    *,
    recipe: str | None = None,
    replicates: Sequence[Path] = (),
    settings: Sequence[Path] = (),
    report_dir: Path | None = None,
    arms: Sequence[str] = (),
    texts: Texts | None = None,
    complete: Completed | None = None,
) -> dict[str, Any] | None:
    """Writes `<run_dir>/report/` from the files of a run and returns its results.

    Writes `results.json`, `held_out_losses.npz` with the loss of every held-out block by arm, seed
    and source, `tables/*.md`, `figures/*.vl.json` with, where vl-convert is
    installed, `.svg` and `.png`, `index.html`, and a `curriculum*.html` for each curriculum with
    scores; for a run without an evaluated arm, only pages. Figures without data are left out.

    Args:
        run_dir: folder `runs/<recipe>` of a run.
        recipe: name of the recipe, if it differs from the folder's.
        replicates: folders of runs with other seeds, only read; blocks may be those of `run_dir`.
        settings: folders of runs of other recipes, shown beside this one; only read.
        report_dir: folder of the report, if not in the run's folder.
        arms: names of the recipe's arms; the page lists the missing ones.
        texts: returns the texts of blocks for the explorer, see `explore`.
        complete: returns the models' completions, given the results.

    Returns:
        Content of `results.json`; None if no arm was evaluated.

    Raises:
        ValueError: the run has not begun, or a file is damaged.
    """
    files, parts = Files(report_dir or run_dir / "report"), parts_of(run_dir, arms)
    name, run = recipe or run_dir.resolve().name, None
    if any(map(is_evaluated, arm_folders(run_dir))) or not has_begun(run_dir):
        run = replace(read_run(run_dir, parts=parts), recipe=name)
    curricula = {folder.name: folder / "curriculum.rod" for folder in arm_folders(run_dir)}
    explorers = write_explorers(curricula, files, recipe=name, texts=texts)
    if run is None:
        write_page(files, [], parts, explorers, recipe=name, folder=run_dir)
        return None
    runs, notes = [run], []
    folders = {Path(folder).resolve(): Path(folder) for folder in [run_dir, *replicates]}
    for folder in [*folders.values()][1:]:  # each once, under whatever path, and not the run itself
        if folder.is_dir() and not any(map(is_evaluated, arm_folders(folder))):
            notes.append(f"Run {folder.name} has no evaluated arm yet and is left out.")
            continue
        other = as_other_seed(read_run(folder, shared_dir=run_dir), run)
        known = {each.seed: each.folder.name for each in runs}
        if other.seed is not None and other.seed in known:
            same = f"the same seed, {other.seed}, as {known[other.seed]}"
            notes.append(f"Run {folder.name} has {same}: it adds no seed, and is left out.")
        elif other.arms:
            runs.append(other)
        else:
            notes += other.disagreements
    others = [(other, judged_results(other)) for other in map(read_run, map(Path, settings))]
    results = results_of_all(runs, notes) | {"settings": [judged for _, judged in others]}
    try:
        results["completions"] = complete(results) if complete else []
    except (ValueError, OSError, ImportError) as error:
        results["completions"] = []
        results["notes"].append(f"Completions are not available: {error}")
    if block_losses := packed_losses(runs):
        files.write(BLOCK_LOSSES, block_losses)
    results["block_losses"] = BLOCK_LOSSES if block_losses else None
    write_page(files, [(run, results), *others], parts, explorers, recipe=name, folder=run_dir)
    return results


def results_of_all(runs: Sequence[Run], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the results of a run, its first, with those of replicates and a common verdict."""
    results, *replicates = map(judged_results, runs)
    results = {"provenance": provenance_of(runs[0].folder, results)} | results
    verdict = across_seeds([each["verdict"] for each in (results, *replicates)])
    added = {"replicates": replicates, "settings": [], "verdict": verdict}
    return results | added | {"notes": [*results["notes"], *notes]}


def packed_losses(runs: Sequence[Run]) -> bytes:
    """Returns an `.npz` of every held-out block's loss, or b"" where none was kept.

    Its arrays are `<arm>/<seed>/<role>/<source>`, nats a token, float32 [blocks]; the base has one
    seed, as all have. The same losses give the same bytes.
    """
    packed, written = io.BytesIO(), set[str]()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, arm in (item for run in runs for item in run.arms.items()):
            for role, by_source in arm.block_losses.items():
                for source, losses in by_source.items():
                    file, array = f"{name}/{arm.seed}/{role}/{source}.npy", io.BytesIO()
                    if file not in written:  # a replicate may share its base
                        np.save(array, losses.astype(np.float32))
                        kind = zipfile.ZIP_DEFLATED
                        archive.writestr(zipfile.ZipInfo(file), array.getvalue(), kind)
                        written.add(file)
    return packed.getvalue() if written else b""


def write_page(
    files: Files,
    shown: Sequence[RunResults],
    parts: Sequence[Part],
    explorers: list[tuple[str, str]],
    *,
    recipe: str,
    folder: Path,
) -> None:
    """Writes the results of the first run, with its tables, figures and page.

    `shown` is the run, and runs of other recipes beside it; none before any evaluation.
    """
    results: Any = shown[0][1] if shown else None
    tables = {}
    for make in TABLES if results else ():
        table = make(results or {})
        tables[table.name] = table
        if table.rows:
            files.write(f"tables/{table.name}.md", table.to_markdown())
    curves = curves_of(parts, list(results["arms"]) if results else ())
    pictures = {name: (picture, list[str]()) for name, picture in curves.items()}
    for name, picture in pictures_of(shown).items() if shown else ():
        written = pictures.setdefault(name, (picture, []))[1]
        if not picture.figure and results is not None:
            results.setdefault("undrawn", []).append(picture.caption)
            continue
        for file, data in files_of(name, picture.figure):
            files.write(f"figures/{file}", data)
            written.append(file)
    if results:
        files.write("results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    known = results["provenance"] if results else provenance_of(folder, {"arms": {}, "sources": {}})
    page = render_page(
        recipe, results, tables, pictures, parts, explorers=explorers, provenance=known
    )
    files.write("index.html", page)
    files.finish()


def write_explorers(
    curricula: Mapping[str, Path], files: Files, *, recipe: str, texts: Texts | None
) -> list[tuple[str, str]]:
    """Writes a page for every curriculum with scores: `curriculum.html` for RoD, or the first arm.

    Of the curricula, by the names of their arms, some may be missing. Returns files and labels.
    """
    found: list[tuple[str, str, dict[str, Any], str]] = []
    for name in sorted(curricula, key=lambda name: ("rod" not in name, len(name), name)):
        path, note = curricula[name], ""
        if not path.exists():
            continue
        try:
            data = explore(path, texts)
        except ValueError as error:
            data, note = explore(path), f"Texts are not available: {error}"
        if data is not None:
            arm = name.removesuffix(".partial")
            file = f"curriculum-{arm}.html" if found else "curriculum.html"
            found.append((file, parse_arm(arm).label, data, note))
    pages = [(file, label) for file, label, _, _ in found]
    for file, label, data, note in found:
        values = {"data": data, "recipe": recipe, "arm": label, "note": note, "pages": pages}
        files.write(file, render("explorer.html", **values))
    return pages


def judged_results(run: Run) -> dict[str, Any]:
    """Returns the results of a run with its verdict.

    Raises:
        ValueError: a file holds invalid values.
    """
    with interpreting(run.folder, besides=(ValueError,)):
        results = results_of(run)
        return results | {"verdict": across_seeds([verdict_of(run, results)])}
