"""Held-out losses per source, of all models in one job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.files import interpreting, move_whole, read_json, refuse_links, write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.run.handover import Inputs, refuse_changes
from nemo_rod.run.model_jobs import ModelJobs

FILE = "evaluation.json"
BLOCK_LOSSES = "held_out_losses.npy"  # one loss per held-out block, in the order of the store
PARTIAL = (BLOCK_LOSSES,)
_INPUTS = ".inputs.json"  # no arm's name begins with a dot


def wanted(config: Config) -> bool:
    """Returns True: every recipe is evaluated."""
    return True


def check(config: Config) -> str | None:
    """Returns None: there is nothing to check or to say beforehand."""


def measure(jobs: ModelJobs, names: list[str]) -> None:
    """Writes `evaluation.json`, and the losses of all blocks, for the arms without it.

    Raises:
        ValueError: as `missing`.
    """
    results = jobs.results
    if not (pending := missing(jobs, names)):
        return
    inputs = {name: results.measured(name) for name in pending}
    models = {name: results.checkpoint(name) for name in pending}
    with measuring_losses(jobs, models, results.path, inputs) as losses:
        for name, result in losses.items():
            if name == "base":
                manifest = results.base / "manifest.json"
                with interpreting(manifest):
                    seed = read_json(manifest, "note")["note"]["seed"]
            else:  # may differ from this command's
                seed = read_json(results.arm(name) / "arm.json", "seed")["seed"]
            folder = results.arm(name)
            folder.mkdir(parents=True, exist_ok=True)
            record = {"arm": name, "seed": seed, "inputs": inputs[name]}
            of_blocks = partial_folder(results.path) / f"{name}.npy"
            if of_blocks.exists():
                move_whole(of_blocks, folder / BLOCK_LOSSES)
            write_json(folder / FILE, result | record, below=folder.parent)


def partial_folder(folder: Path) -> Path:
    """Returns the folder of the losses measured so far, before they are handed over."""
    return folder / "evaluation.partial"


@contextmanager
def measuring_losses(
    jobs: ModelJobs, models: dict[str, Path], folder: Path, inputs: dict[str, Inputs]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yields the held-out losses of models by name, and removes the job's own files after it.

    Losses of an interrupted attempt are used again if their inputs are the same.
    """
    work = partial_folder(folder)
    refuse_links(work)
    work.mkdir(exist_ok=True)
    precision = {"model.precision": jobs.config.model.precision}
    valid = valid_losses(work, {name: inputs[name] | precision for name in models})
    paths = {name: str(path) for name, path in models.items() if name not in valid}
    if paths:
        jobs.run(jobs.job(EvaluateJob, "evaluate", work, models=paths), work)
    yield {name: valid.get(name) or read_json(work / f"{name}.json", "loss") for name in models}
    shutil.rmtree(work)


def valid_losses(work: Path, inputs: dict[str, Inputs]) -> dict[str, dict[str, Any]]:
    """Returns the losses of an interrupted attempt whose inputs are the same; removes others."""
    record, valid = work / _INPUTS, dict[str, dict[str, Any]]()
    earlier = read_json(record) if record.exists() else {}
    for name in inputs:
        file = work / f"{name}.json"
        # an arm named "job" shares its file with the job
        is_same = file.exists() and earlier.get(name) == inputs[name]
        if is_same and "loss" in (losses := read_json(file)):
            valid[name] = losses
        else:
            file.unlink(missing_ok=True)
    write_json(record, earlier | inputs)
    return valid


def missing(jobs: ModelJobs, names: list[str]) -> list[str]:
    """Returns the arms without an `evaluation.json`.

    Raises:
        ValueError: a result is of other weights or blocks.
    """
    inputs = {name: jobs.results.measured(name) for name in names}
    files = {name: jobs.results.arm(name) / FILE for name in names}
    return [name for name in names if not is_measured(files[name], inputs[name], "evaluate")]


def is_measured(path: Path, inputs: Inputs, stage: str) -> bool:
    """Returns whether a stage's file of losses exists.

    Raises:
        ValueError: the file has other inputs.
    """
    if not path.exists():
        return False
    with interpreting(path):
        recorded = read_json(path, "inputs")["inputs"]
        refuse_changes(path, recorded, inputs, f"add rebuild=[{stage}] to evaluate again")
    return True
