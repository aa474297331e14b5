"""Measurements of every arm: held-out losses, by one job for all models, and the tasks."""

from __future__ import annotations

from functools import partial

from nemo_rod.files import interpreting, read_json, write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.recipe import ask_tasks
from nemo_rod.recipe.handover import Inputs, Stage
from nemo_rod.recipe.model_jobs import ModelJobs

FILE = "evaluation.json"
# measurements of a model, invalid once it is made again
MEASURED = (FILE, ask_tasks.FILE, "tasks.answered.partial.json")


def evaluate_stage(jobs: ModelJobs) -> Stage:
    """Returns the stage that measures held-out losses and tasks of every arm without them."""
    config = jobs.config
    wanted = [config.arm] if config.arm else config.arms
    names = ["base", *(name for name in wanted if name != "base")]
    has_tasks = ask_tasks.has_tasks(config)
    wanted_files = (FILE, ask_tasks.FILE) if has_tasks else (FILE,)
    files = tuple(jobs.results.arm(name) / file for name in names for file in wanted_files)

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
        results=files,
        needs=tuple(names),
        preview=partial(ask_tasks.check_tasks, config) if has_tasks else None,
    )


def evaluate_arms(jobs: ModelJobs, names: list[str]) -> None:
    """Writes `evaluation.json` for the arms without one.

    Args:
        jobs: jobs of the run.
        names: names of the arms, `base` included.

    Raises:
        ValueError: if an arm is missing, or was evaluated with other weights or blocks.
    """
    inputs = _inputs(jobs, names)
    missing = not_evaluated(jobs, names)
    work = jobs.results.path / "evaluation.partial"
    work.mkdir(exist_ok=True)
    models = {name: str(jobs.results.checkpoint(name)) for name in missing}
    jobs.run(EvaluateJob(**jobs.common("evaluate", work), models=models), work)
    for name in missing:
        result = read_json(work / f"{name}.json")
        result |= {"arm": name, "seed": _seed(jobs, name), "inputs": inputs[name]}
        folder = jobs.results.arm(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, result)
    for file in work.iterdir():
        file.unlink()
    work.rmdir()


def not_evaluated(jobs: ModelJobs, names: list[str]) -> list[str]:
    """Returns the arms without an `evaluation.json`.

    Raises:
        ValueError: if an arm is missing, or was evaluated with other weights or blocks.
    """
    inputs = _inputs(jobs, names)
    return [name for name in names if not _is_evaluated(jobs, name, inputs[name])]


def _inputs(jobs: ModelJobs, names: list[str]) -> dict[str, Inputs]:
    blocks = jobs.results.block_counts()["digest"]
    return {name: {"model": jobs.results.weights(name), "blocks": blocks} for name in names}


def _is_evaluated(jobs: ModelJobs, name: str, inputs: Inputs) -> bool:
    path = jobs.results.arm(name) / FILE
    if not path.exists():
        return False
    with interpreting(path):
        for key, value in read_json(path, "inputs")["inputs"].items():
            if value != inputs[key]:
                raise ValueError(
                    f"{path} was made with {key}={value}, but now it is {inputs[key]}: add "
                    "rebuild=[evaluate] to evaluate again, or choose another run_dir."
                )
    return True


def _seed(jobs: ModelJobs, name: str) -> int:
    """Returns the seed that the model was trained with, which may differ from this command's."""
    if name != "base":
        return read_json(jobs.results.arm(name) / "arm.json", "seed")["seed"]
    manifest = jobs.results.base / "manifest.json"
    with interpreting(manifest):
        return read_json(manifest, "note")["note"]["seed"]
