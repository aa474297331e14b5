"""`[ARM_]residual`: what an arm of another run has learned, added to the base of this one.

For instruct models, whose tuning is kept apart: this run's base is the instruct model, and the run
in `residual.run` has trained the model before its tuning, on the same blocks. Nothing is trained
for the arm here; its cost is that of the other run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_rod.config import Config, section
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.stages import Stages
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


def other_run(stages: Stages) -> RunFolder:
    """Returns the run whose arms have learned what is added."""
    run = section(stages.config, Residual).run
    assert run is not None
    return RunFolder(Path(run), stages.results.recipe)
