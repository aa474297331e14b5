"""Measurements of every arm: held-out losses, by one job for all models, and the tasks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rod.files import interpreting, read_json, write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.lab.tasks import stage as ask_tasks
from nemo_rod.run.handover import Inputs, Stage, refuse_changes
from nemo_rod.run.model_jobs import ModelJobs

FILE = "evaluation.json"
# measurements of a model, finished or not; invalid once it is made again
MEASURED = (FILE, ask_tasks.FILE, *ask_tasks.PARTIAL)
_MADE_OF = ".inputs.json"  # no arm's name begins with a dot


def evaluate_stage(jobs: ModelJobs) -> Stage:
    """Returns the stage that measures held-out losses and tasks of every arm without them."""
    config = jobs.config
    wanted = [config.arm] if config.arm else config.arms
    names = ["base", *(name for name in wanted if name != "base")]
    has_tasks = ask_tasks.has_tasks(config)
    wanted_files = (FILE, ask_tasks.FILE) if has_tasks else (FILE,)
    files = tuple(jobs.results.arm(name) / file for name in names for file in wanted_files)
    measured_files = tuple(jobs.results.arm(name) / file for name in names for file in MEASURED)

    def run() -> None:
        if ask_tasks.not_asked(jobs, names):
            ask_tasks.check_tasks(config)  # finds a wrong name before hours of work
        if not_evaluated(jobs, names):
            evaluate_arms(jobs, names)
        ask_tasks.ask_arms(jobs, names)

    return Stage(
        name="evaluate",
        command="evaluate" + (f" arm={config.arm}" if config.arm else ""),
        title=f"evaluate {config.arm or 'every arm'}",
        folder=jobs.results.path / "arms",
        proof=files,
        is_done=lambda: not (not_evaluated(jobs, names) or ask_tasks.not_asked(jobs, names)),
        run=run,
        results=(*measured_files, partial_folder(jobs.results.path)),
        needs=tuple(names),
        preview=partial(ask_tasks.check_tasks, config) if has_tasks else None,
    )


def evaluate_arms(jobs: ModelJobs, names: list[str]) -> None:
    """Writes `evaluation.json` for the arms without one; refuses what `not_evaluated` does."""
    missing = not_evaluated(jobs, names)
    inputs = {name: jobs.results.measured(name) for name in missing}
    models = {name: jobs.results.checkpoint(name) for name in missing}
    with measured(jobs, models, jobs.results.path, inputs) as losses:
        for name, result in losses.items():
            result |= {"arm": name, "seed": _seed(jobs, name), "inputs": inputs[name]}
            folder = jobs.results.arm(name)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / FILE, result)


def partial_folder(folder: Path) -> Path:
    """Returns the folder of the losses measured so far, before they are handed over."""
    return folder / "evaluation.partial"


@contextmanager
def measured(
    jobs: ModelJobs, models: dict[str, Path], folder: Path, inputs: dict[str, Inputs]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yields the held-out losses of models by name, and removes the job's own files after it.

    An interrupted attempt's losses are kept if they were measured with the same inputs.
    """
    work = partial_folder(folder)
    work.mkdir(exist_ok=True)
    precision = {"model.precision": jobs.config.model.precision}
    kept = _begin(work, {name: inputs[name] | precision for name in models})
    paths = {name: str(path) for name, path in models.items() if name not in kept}
    if paths:
        jobs.run(EvaluateJob(**jobs.common("evaluate", work), models=paths), work)
    yield {name: kept.get(name) or read_json(work / f"{name}.json", "loss") for name in models}
    shutil.rmtree(work)


def _begin(work: Path, now: dict[str, Inputs]) -> dict[str, dict[str, Any]]:
    """Returns the losses in `work` that still hold, by model; removes the others' files."""
    made_of, kept = work / _MADE_OF, dict[str, dict[str, Any]]()
    earlier = read_json(made_of) if made_of.exists() else {}
    for name, inputs in now.items():
        file = work / f"{name}.json"
        # an arm named "job" shares its file with the job
        if file.exists() and earlier.get(name) == inputs and "loss" in (found := read_json(file)):
            kept[name] = found
        else:
            file.unlink(missing_ok=True)
    write_json(made_of, earlier | now)
    return kept


def not_evaluated(jobs: ModelJobs, names: list[str]) -> list[str]:
    """Returns the arms without an `evaluation.json`; refuses one of other weights or blocks."""
    inputs = {name: jobs.results.measured(name) for name in names}
    files = {name: jobs.results.arm(name) / FILE for name in names}
    return [name for name in names if not is_measured(files[name], inputs[name], "evaluate")]


def is_measured(path: Path, inputs: Inputs, stage: str) -> bool:
    """Returns whether a stage's file of losses is there; refuses one of other inputs."""
    if not path.exists():
        return False
    with interpreting(path):
        recorded = read_json(path, "inputs")["inputs"]
        refuse_changes(path, recorded, inputs, do=f"add rebuild=[{stage}] to evaluate again")
    return True


def _seed(jobs: ModelJobs, name: str) -> int:
    """Returns the seed that the model was trained with, which may differ from this command's."""
    if name != "base":
        return read_json(jobs.results.arm(name) / "arm.json", "seed")["seed"]
    manifest = jobs.results.base / "manifest.json"
    with interpreting(manifest):
        return read_json(manifest, "note")["note"]["seed"]
