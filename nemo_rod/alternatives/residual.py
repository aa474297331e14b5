"""`[ARM_]residual`: what an arm of another run has learned, added to the base of this one.

For instruct models, whose tuning is kept apart: this run's base is the instruct model, and the run
in `residual.run` has trained the model before its tuning, on the same blocks. Nothing is trained
for the arm here; its cost is that of the other run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, section
from nemo_rod.files import read_json, write_json
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.handover import HandOver, Inputs, Stage
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST
from nemo_rod.selection.arm_names import RESIDUAL


@dataclass
class Residual:
    """The arms `residual`, which add to a model what another one has learned."""

    run: str | None = None  # folder of the run that trained it, with this run's blocks


def arm(config: Config, name: str) -> None:
    """Refuses such an arm without the run that it takes; it is no variant of another."""
    if RESIDUAL.fullmatch(name) and section(config, Residual).run is None:
        raise ValueError(
            f"The arm {name} needs residual.run, the folder of the run that trained the model "
            "before its tuning: set it, or take the arm out."
        )


def residual_stage(stages: Stages, name: str) -> Stage:
    """Returns the stage of such an arm."""
    results, run = stages.results, section(stages.config, Residual).run
    assert run is not None
    other = RunFolder(Path(run), results.recipe)
    trained = name.removesuffix("residual").removesuffix("_") or SPECIALIST

    def inputs() -> Inputs:
        ours, theirs = (r.block_counts()["digest"] for r in (results, other))
        if ours != theirs:
            raise ValueError(
                f"{other.path} was trained on other blocks ({theirs}) than those of this run "
                f"({ours}): prepare the same ones, with the same tokenizer."
            )
        made_of = {"base": results.weights("base"), "blocks": ours}
        return made_of | {"origin": other.weights("base"), "trained": other.weights(trained)}

    def make(folder: Path) -> dict[str, Any]:
        from nemo_rod.lab.merging import merge_checkpoints

        base, origin = (r.checkpoint("base") for r in (results, other))
        if not (folder / "hf").exists():  # whole, if an interrupted attempt left it
            adapted, code = other.checkpoint(trained), stages.config.model.trust_remote_code
            merge_checkpoints(base, adapted, folder / "hf", 1.0, origin=origin, code=code)
        description = read_json(other.arm(trained) / "arm.json", "steps")
        write_json(folder / "arm.json", {**description, "name": name, "kind": "merged"})
        return {"weights": checkpoint_digest(folder / "hf")}

    return HandOver(name, results.arm(name), inputs, make).stage(
        f"merge arm={name}",
        f"add what {trained} of {run} has learned",
        needs=("base",),
        runs_model=False,
        extra="eval",
    )
