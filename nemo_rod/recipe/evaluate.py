"""Held-out losses of every arm, by one job that visits all models that have none yet."""

from __future__ import annotations

import json

from nemo_rod.files import write_json
from nemo_rod.jobs import EvaluateJob
from nemo_rod.recipe.handover import Inputs
from nemo_rod.recipe.stages import Stages


def evaluate_arms(stages: Stages, names: list[str]) -> None:
    """Writes `evaluation.json` for the arms that have none.

    Args:
        stages: of the run.
        names: arms, `base` included.

    Raises:
        ValueError: if an arm is missing, or was evaluated with other weights or blocks.
    """
    inputs = _inputs(stages, names)
    missing = not_evaluated(stages, names)
    work = stages.results.path / "evaluation.partial"
    work.mkdir(exist_ok=True)
    models = {name: str(stages.results.checkpoint(name)) for name in missing}
    stages.jobs.run(EvaluateJob(**stages.jobs.common("evaluate", work), models=models), work)
    for name in missing:
        result = json.loads((work / f"{name}.json").read_text())
        result |= {"arm": name, "seed": _seed(stages, name), "inputs": inputs[name]}
        folder = stages.results.arm(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "evaluation.json", result)
    for file in work.iterdir():
        file.unlink()
    work.rmdir()


def not_evaluated(stages: Stages, names: list[str]) -> list[str]:
    """Those of the arms that have no `evaluation.json` yet.

    Raises:
        ValueError: if an arm is missing, or was evaluated with other weights or blocks.
    """
    inputs = _inputs(stages, names)
    return [name for name in names if not _is_evaluated(stages, name, inputs[name])]


def _inputs(stages: Stages, names: list[str]) -> dict[str, Inputs]:
    blocks = stages.results.block_counts()["digest"]
    return {name: {"model": stages.results.weights(name), "blocks": blocks} for name in names}


def _is_evaluated(stages: Stages, name: str, inputs: Inputs) -> bool:
    path = stages.results.arm(name) / "evaluation.json"
    if not path.exists():
        return False
    for key, value in json.loads(path.read_text())["inputs"].items():
        if value != inputs[key]:
            raise ValueError(
                f"{path} was made with {key}={value}, but now it is {inputs[key]}: add "
                "rebuild=[evaluate] to evaluate again, or choose another run_dir."
            )
    return True


def _seed(stages: Stages, name: str) -> int:
    """The seed that the model was trained with, which need not be this command's."""
    if name == "base":
        manifest = json.loads((stages.results.base / "manifest.json").read_text())
        return manifest["note"]["seed"]
    return json.loads((stages.results.arm(name) / "arm.json").read_text())["seed"]
