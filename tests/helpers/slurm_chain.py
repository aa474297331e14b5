"""A recipe as a chain of jobs of a real Slurm: how tests start it, and follow its jobs."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster, wait_for

from nemo_rod.config import Config
from nemo_rod.run.launch.slurm import render_stage
from nemo_rod.run.stage_log import StageLog

RECIPE = [
    "recipe=toy_synthetic", "arms=[no_replay,rod,merge_0.6]",
    "domain.sources.dialect.max_bytes=200000",
    *(f"domain.sources.chain_{i}.max_bytes=40000" for i in range(9)), "pretrain.steps=40",
    "train.steps=200", "checkpoint.every=20",
]  # fmt: skip
# One "GPU" a node, so that the recipe's two processes are one on each of two nodes.
ON_SLURM = [
    "launcher=slurm", "launcher.grace_seconds=60", "+cluster.sbatch.gpus-per-node=1",
    "cluster.gpus_per_node=1", "cluster.cpu_cores=1", "cluster.cpu_stage_cores=1",
    "cluster.cpu_stage_memory_gib=1", "cluster.time=00:50:00",
]  # fmt: skip


def nemo_rod(*arguments: str, cluster: Cluster | None = None, status: int = 0) -> str:
    """Runs a command, which ends with `status`; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rod.cli", *arguments],
        env=cluster.environment if cluster else None,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def write_job(folder: Path, config: Config, *command: str, time: str = "00:30:00") -> str:
    """A job as `launcher=slurm` writes it, with a command of the test's; returns its script."""
    (folder / "stage.sh").write_text(render_stage(config))
    (folder / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --time={time} --signal=B:USR1@60 --requeue --open-mode=append\n"
        f"#SBATCH --cpus-per-task=1 --output={folder}/out\n"
        f"export RECORD={folder}/record\nrecord=$RECORD\n"
        f"command=({shlex.join(command)})\nsource {folder}/stage.sh\n"
    )
    return str(folder / "job.sbatch")


@dataclass
class Chain:
    """A run on Slurm: its folder, the numbers of its jobs, and the output of `status` meanwhile."""

    cluster: Cluster
    run_dir: Path
    shown: dict[str, str]

    @property
    def numbers(self) -> dict[str, str]:
        lines = (self.run_dir / "launch" / "slurm" / "jobs.tsv").read_text().splitlines()
        return dict(line.split("\t") for line in lines)

    def events(self, stage: str) -> list[dict[str, Any]]:
        return StageLog(self.run_dir, stage).events()

    def kinds(self, stage: str) -> list[str]:
        return [event["event"] for event in self.events(stage)]

    def job(self, stage: str) -> dict[str, str]:
        return self.cluster.job(self.numbers[stage])

    def status(self) -> str:
        return nemo_rod("status", str(self.run_dir), cluster=self.cluster)

    def reach(self, arm: str, attempt: int, step: int) -> None:
        """Waits until an arm has done `step` steps in its `attempt`-th start."""
        metrics = self.run_dir / "arms" / f"{arm}.partial" / "metrics.jsonl"

        def is_there() -> bool:
            assert "failed" not in self.kinds(arm), self.status()
            began = self.kinds(arm).count("began") == attempt
            return began and metrics.exists() and len(metrics.read_text().splitlines()) >= step

        wait_for(is_there, 2400, f"{arm} did not come to step {step}", every=0.1)

    def preempt(self, arm: str) -> None:
        self.cluster.preempt(5)
        self.wait_until_stopped(arm)

    def wait_until_stopped(self, arm: str) -> None:
        """Waits until an arm that was asked to stop says that it did."""
        wait_for(lambda: "stopped" in self.kinds(arm), 120, f"{arm} was not asked to stop")

    def trained_the_same_here(self, folder: Path, arms: Sequence[str], *recipe: str) -> None:
        """Trains arms on this machine in one go, and compares them, to the byte."""
        copy(self.run_dir, "blocks", "base", "references", to=folder)
        for arm in arms:
            print(nemo_rod("train", *recipe, f"arm={arm}", f"run_dir={folder}"))
            ours, theirs = (run / "arms" / arm for run in (self.run_dir, folder))
            for name in ("curriculum.rod", "hf/model.safetensors"):
                assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def copy(run_dir: Path, *folders: str, to: Path) -> None:
    for folder in folders:
        subprocess.run(["cp", "-r", str(run_dir / folder), str(to / folder)], check=True)
