"""`nemo-rod report FOLDER`: the page of a job that selects in its own trainer (docs/swap-in.md).

The hosts write the files of such a folder; they have the forms of a trained arm's:

    job.json                 number of steps
    curriculum.rod           blocks drawn and trained on
    metrics.jsonl            metrics by step, with held-out losses
    validation_start.json    held-out losses of the base, before step 0

A job that scored is judged by another one, which follows `report/tables/schedule_like_rod.csv`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.commands.arguments import Arguments
from nemo_rod.files import read_json
from nemo_rod.lab.history import read_history
from nemo_rod.lab.metrics import Metrics, metrics_of
from nemo_rod.lab.report.build_report import Files, results_of_all, write_explorers, write_page
from nemo_rod.lab.report.figures.picture import refuse_undrawn
from nemo_rod.lab.report.run_files import FREE, Arm, Run
from nemo_rod.lab.report.under_way import read_part
from nemo_rod.roles import ROLES
from nemo_rod.selection.arm_names import parse_arm
from nemo_rod.selection.arms import costs
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.held_out import START_FILE, weights_of

_SCHEDULE = "tables/schedule_like_rod.csv"
MARKS: set[str] = set()  # words of the form without a recipe: it is known by its folder
_USAGE = """\
nemo-rod report FOLDER
       nemo-rod report recipe=NAME [KEY=VALUE ...]"""
_DESCRIPTION = """\
Writes FOLDER/report/, with the page of a job that selects in its own trainer. FOLDER is the one
that the job records its choices in, or the folder of its checkpoints. The job may still run.

With recipe=, the report of a recipe's run, in Hydra's grammar: `nemo-rod report recipe=NAME --cfg
job` shows all keys of that form."""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod report` with a folder."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the job's record")
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Writes the report, and prints where its page is."""
    folder = options.folder
    if not (folder / "curriculum.rod").exists() and (folder / "rod").is_dir():
        folder = folder / "rod"
    results = build_job_report(folder)
    print(folder / "report" / "index.html")
    refuse_undrawn(results or {})


def build_job_report(folder: Path) -> dict[str, Any] | None:
    """Writes `FOLDER/report/`, as `build_report` does for a run.

    Returns:
        Content of `results.json`; None if no held-out losses are recorded yet.

    Raises:
        ValueError: the folder has no record, or a file is damaged.
    """
    file, files = folder / "curriculum.rod", Files(folder / "report")
    is_arm = (folder / "arm.json").exists()
    if is_arm or not file.exists():
        lacks = "has no curriculum.rod" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"{folder} {'is an arm of a run' if is_arm else lacks}: expected a run folder, or the "
            "one that nemo_rod.install(..., out=) or RoDBatches(..., out=) writes, by default rod/ "
            "beside the job's checkpoints."
        )
    with Curriculum.open(file, read_only=True) as curriculum:
        header, done = curriculum.header, len(curriculum)
    name = "rod" if header.scored else "watched"
    part = read_part(folder, name, parse_arm(name).label)
    if part.done is None or part.done != part.steps:
        part = replace(part, state="running")
    title = folder.resolve().parent.name if folder.resolve().name == "rod" else folder.name
    explorers = write_explorers({name: file}, files, recipe=title, texts=None)
    history = read_history(file) if done else None
    notes = []
    if header.scored and history:  # how a job that follows RoD's share by step is run
        share_T = history.share_T
        rows_T = zip(history.step_T.tolist(), share_T.tolist(), strict=True)
        lines = ["step,replay", *(f"{step},{share}" for step, share in rows_T)]
        files.write(_SCHEDULE, "\n".join(lines) + "\n")
        notes.append(
            "To know whether RoD helped, run the job again with the same pools, blocks at random: "
            f"policy=Schedule(file={str(files.out / _SCHEDULE)!r}) has RoD's share of replay by "
            f"step, policy=Schedule(replay={share_T.mean():.4f}) its mean share; nothing is scored."
        )
    losses = {
        "base": _losses(metrics_of([{**part.start, "step": -1}])),
        name: _losses(part.metrics),
    }
    losses = {arm: loss for arm, loss in losses.items() if loss}
    values = (value for loss in losses.values() for of in loss.values() for value in of.values())
    is_finite = all(map(isfinite, values))  # otherwise the job diverges, as its curves show
    if name not in losses or history is None or not is_finite:
        write_page(files, [], [part], explorers, recipe=title, folder=folder)
        return None
    facts = {"base": FREE, name: _facts(header, part.metrics, done, folder / "job.json")}
    arms = {
        arm: Arm(
            name=parse_arm(arm),
            seed=header.seed,
            loss={role: loss.get(role, {}) for role in ROLES},
            tasks=None,
            blocks=None,
            facts=facts[arm],
            history=None if arm == "base" else history,
        )
        for arm, loss in losses.items()
    }
    counts = {role: {s.name: s.count for s in header.sources if s.role == role} for role in ROLES}
    weights = {r: weights_of(losses[name].get(r, {}), r, header.sources) for r in ROLES}
    run = Run(folder, title, arms, counts, (), [], weights)
    if header.first_step:
        text = f"The record begins at step {header.first_step}: costs and shares are of the steps "
        notes.insert(0, text + "since then.")
    if "base" not in losses:
        notes.append(
            f"{START_FILE} is not there: the base's held-out losses, from which F_val counts, are "
            "not known."
        )
    results = results_of_all([run], notes)
    write_page(files, [(run, results)], [part], explorers, recipe=title, folder=folder)
    return results


def _losses(read: Metrics) -> dict[str, dict[str, float]]:
    """Returns the latest held-out losses, by role and source; empty without any."""
    keys = {(role, source): key for role in ROLES for source, key in read.held_out(role).items()}
    latest = max((read.columns[key][0][-1] for key in keys.values()), default=None)
    losses: dict[str, dict[str, float]] = {}
    for (role, source), key in keys.items():
        row, value = read.columns[key]
        if row[-1] == latest:
            losses.setdefault(role, {})[source] = float(value[-1])
    return losses


def _facts(header: CurriculumHeader, read: Metrics, done: int, job: Path) -> dict[str, Any]:
    """Returns the keys of an `arm.json`, as far as a job's record has them."""
    since = int(np.searchsorted(read.step_T, header.first_step))
    seconds = read.values("timing/train/total", since)
    about = read_json(job) if job.exists() else {}
    scored_length = about.get("scored_length", header.block_size) if header.scored else 0
    return {
        "kind": "trained",
        **costs(
            steps=done,
            batch_size=header.num_chosen,
            block_size=header.block_size,
            scored_tokens=header.num_candidates * scored_length,
        ),
        "wall_seconds": float(seconds.sum()),
        "seconds_per_step": float(np.median(seconds)) if len(seconds) else None,
        "anneals_at": None,
    }
