"""The jobs of a run that run a model: written from its configuration, run, described."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, Optimisation
from nemo_rod.corpus.shards import write_json
from nemo_rod.jobs import Job, TrainJob, write_job
from nemo_rod.launch.digests import digest
from nemo_rod.launch.folder import RunFolder
from nemo_rod.launch.local import run_job
from nemo_rod.launch.nemo_rl import run_on_nemo_rl
from nemo_rod.selection.arms import Arm, make_arm


class ModelJobs:
    """Writes and runs the jobs of one run.

    Args:
        config: the checked configuration.
        results: of the run.
    """

    def __init__(self, config: Config, results: RunFolder) -> None:
        self.config, self.results = config, results

    def common(self, name: str, out: Path) -> dict[str, Any]:
        """What every job of this run is told."""
        return {
            "name": name,
            "blocks": str(self.results.blocks),
            "out": str(out),
            "parallel": self.config.parallel,
            "precision": self.config.model.precision,
            "scoring_micro_batch_size": self.config.scoring.micro_batch_size,
            "seed": self.config.seed,
            "stall_seconds": self.config.launcher.stall_seconds,
        }

    def run(self, job: Job, folder: Path) -> None:
        """Runs a job whose file goes into `folder`."""
        file = folder / "job.json"
        write_job(job, file)
        if self.config.launcher.kind == "nemo_rl":
            run_on_nemo_rl(job, self.config)
            return
        world_size = self.config.parallel.world_size
        run_job(
            file,
            world_size=world_size,
            launcher=self.config.launcher,
            log=self.results.log(job.name),
        )

    def schedule(self, name: str) -> Optimisation:
        """The arm's own number of steps; all else is the same for all arms."""
        train = self.config.train
        if name in self.config.arm_steps:
            return dataclasses.replace(train, steps=self.config.arm_steps[name])
        if name != "rod_compute_matched":
            return train
        # as many plain steps' worth of compute as a fixed-replay arm, scoring included
        share = self.config.scoring.eighths / 8
        per_step = 1 + self.config.selection.multiplier * share / 3
        return dataclasses.replace(train, steps=round(train.steps / per_step))

    def arm(
        self, name: str, optimisation: Optimisation, blocks: dict[str, Any] | None = None
    ) -> Arm:
        """An arm's pools and policy, over the store's blocks or over as many as are planned."""
        selection, blocks = self.config.selection, blocks or self.results.block_counts()
        return make_arm(
            name,
            num_adaptation=blocks["num_adaptation"],
            num_replay=blocks["num_replay"],
            batch_size=optimisation.batch_size,
            multiplier=selection.multiplier,
            balance=selection.balance,  # type: ignore[arg-type]
            kappa=selection.kappa,
            seed=self.config.seed,
            eighths=self.config.scoring.eighths,
        )

    def train(
        self,
        name: str,
        folder: Path,
        model: Path,
        arm: Arm,
        optimisation: Optimisation,
        references: list[Path],
    ) -> None:
        """Trains an arm from `model` into `folder`."""
        decides = {"arm": dataclasses.asdict(arm), "train": dataclasses.asdict(optimisation)}
        job = TrainJob(
            **self.common(name, folder),
            model=str(model),
            arm=dataclasses.asdict(arm),
            optimisation=optimisation,
            references=[str(reference) for reference in references],
            on_nonfinite=self.config.selection.on_nonfinite,
            checkpoint_every=self.config.checkpoint.every,
            checkpoint_keep=self.config.checkpoint.keep,
            validation_every=self.config.validation.every,
            validation_blocks=self.config.validation.blocks,
            config_digest=digest(json.dumps(decides, sort_keys=True).encode()),
        )
        self.run(job, folder)

    def describe(self, folder: Path, name: str, arm: Arm, optimisation: Optimisation) -> None:
        """`arm.json`: what the run was and what it cost, for the report."""
        steps = optimisation.steps
        block_size = self.config.domain.block_size
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        description = {
            "arm": name,
            "kind": "trained",
            "seed": self.config.seed,
            "steps": steps,
            "batch_size": optimisation.batch_size,
            "block_size": block_size,
            "multiplier": arm.multiplier,
            "scored_eighths": arm.eighths,
            "pools": arm.balance,
            "policy": type(arm.policy()).__name__,
            "trained_tokens": steps * optimisation.batch_size * block_size,
            "scored_tokens": round(steps * arm.scored_blocks * block_size),
            "compute": arm.compute(steps),
            "wall_seconds": sum(row["timing/train/total"] for row in rows),
        }
        write_json(folder / "arm.json", description)
