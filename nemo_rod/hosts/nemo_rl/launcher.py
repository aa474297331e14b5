"""`launcher=nemo_rl`: NeMo-RL's workers train and score, on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.config import Config
from nemo_rod.hosts.nemo_rl.from_job import nemo_rl_values
from nemo_rod.hosts.nemo_rl.recipe_keys import determining_overrides, overrides
from nemo_rod.jobs import Job, ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS, logger_names
from nemo_rod.run.handover import Inputs
from nemo_rod.run.launch.local import Local
from nemo_rod.run.variants import ArmSettings


class NemoRL(Local):
    """Runs jobs that train or score on NeMo-RL; all other jobs run here."""

    environment = False
    bridge = False

    def check_arm(self, arm: ArmSettings, config: Config) -> None:
        """Refuses an arm that NeMo-RL's workers cannot train."""
        scoring, parallel = arm.scoring, config.parallel
        if parallel.context > 1 or parallel.virtual_pipeline > 1:
            raise ValueError(
                f"parallel.context={parallel.context} and virtual_pipeline="
                f"{parallel.virtual_pipeline} do not run on NeMo-RL: set both to 1."
            )
        if lacking := {*logger_names(config.logger)} - {*LOGGERS}:
            raise ValueError(
                f"logger={config.logger} needs {', '.join(sorted(lacking))}, which NeMo-RL lacks: "
                "leave it out, or use launcher=local or slurm."
            )
        for unsupported, feature, cure in (
            (arm.scores and scoring.every != 1, f"has scoring.every={scoring.every}",
             "set scoring.prefix instead"),
            (arm.scores and scoring.precision is not None,
             f"has scoring.precision={scoring.precision}", "leave scoring.precision unset"),
            (arm.variant.converge, "ends when it has converged", "give it a number of steps"),
        ):  # fmt: skip
            if unsupported:
                raise ValueError(
                    f"{arm.name} {feature}, which NeMo-RL's workers cannot run: use "
                    f"launcher=local or slurm, or {cure}."
                )

    def inputs(self, config: Config, *, scoring: bool) -> Inputs:
        """Returns the overrides of NeMo-RL's own keys that determine the result of a job."""
        return determining_overrides(config, scoring=scoring)

    def exports(self, arm: str) -> bool:
        """Returns False: NeMo-RL's own converters export its checkpoints."""
        return False

    def run_job(self, job: Job, file: Path, config: Config, log: Path) -> None:
        """Runs a job on the workers and waits, or here if it neither trains nor scores.

        Raises:
            ValueError: NeMo-RL does not support the job, or the configuration does not fit it.
            RuntimeError, Stopped: see `cluster.run`.
        """
        if not isinstance(job, TrainJob | ReferenceJob):
            super().run_job(job, file, config, log)
            return
        from nemo_rod.hosts.nemo_rl import cluster, settings

        values = nemo_rl_values(job, gpus_per_node=config.cluster.gpus_per_node)
        merged: Any = OmegaConf.to_container(OmegaConf.merge(values, overrides(config)))
        command = "train" if isinstance(job, TrainJob) else "reference"
        cluster.run(command, settings.compose(merged))
