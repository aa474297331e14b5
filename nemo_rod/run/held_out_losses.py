"""Held-out losses per source, of all models in one job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.files import interpreting, read_json, write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.run.handover import Inputs, refuse_changes
from nemo_rod.run.model_jobs import ModelJobs

FILE = "evaluation.json"
PARTIAL = ()
_MADE_OF = ".inputs.json"  # no arm's name begins with a dot


def wanted(config: Config) -> bool:
    """Returns True: every recipe is evaluated."""
    return True


def check(config: Config) -> str | None:
    """Returns None: there is nothing to check or to say beforehand."""


def measure(jobs: ModelJobs, names: list[str]) -> None:
    """Writes `evaluation.json` for the arms without one; refuses what `missing` does."""
    if not (wanted := missing(jobs, names)):
        return
    inputs = {name: jobs.results.measured(name) for name in wanted}
    models = {name: jobs.results.checkpoint(name) for name in wanted}
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


def missing(jobs: ModelJobs, names: list[str]) -> list[str]:
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
