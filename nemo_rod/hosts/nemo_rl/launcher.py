"""`launcher=nemo_rl`: NeMo-RL's workers train and score, on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.hosts.nemo_rl.from_job import run_on_nemo_rl
from nemo_rod.hosts.nemo_rl.recipe_keys import overrides_of_scoring, overrides_of_training
from nemo_rod.jobs import Job, ReferenceJob, TrainJob
from nemo_rod.run.handover import Inputs
from nemo_rod.run.launch.local import Local
from nemo_rod.run.variants import ArmSettings


class NemoRL(Local):
    """Hands jobs that train or score to NeMo-RL; all other jobs run here."""

    environment = False
    bridge = False

    def check_arm(self, arm: ArmSettings) -> None:
        """Refuses an arm that NeMo-RL's workers cannot train."""
        scoring = arm.scoring
        for cannot, what, instead in (
            (arm.scores and scoring.every != 1, f"has scoring.every={scoring.every}",
             "set scoring.prefix instead"),
            (arm.scores and scoring.precision is not None,
             f"has scoring.precision={scoring.precision}", "leave scoring.precision unset"),
            (arm.variant.converge, "ends when it has converged", "give it a number of steps"),
        ):  # fmt: skip
            if cannot:
                raise ValueError(
                    f"{arm.name} {what}, which NeMo-RL's workers cannot: use launcher=local or "
                    f"slurm, or {instead}."
                )

    def inputs(self, config: Config, *, scoring: bool) -> Inputs:
        """Returns the overrides of NeMo-RL's own keys that determine what a job computes."""
        return overrides_of_scoring(config) if scoring else overrides_of_training(config)

    def exports(self, arm: str) -> bool:
        """Returns False: NeMo-RL's own converters export its checkpoints."""
        return False

    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        """Runs a job on the workers, or here if it neither trains nor scores."""
        if isinstance(job, TrainJob | ReferenceJob):
            run_on_nemo_rl(job, config)
        else:
            super().run_job(job, file, config, log)
