"""A recipe as a chain of jobs of a real Slurm: how tests start it, and follow its jobs."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster, wait_for

from nemo_rod.run.stage_log import StageLog

RECIPE = [
    "recipe=toy_synthetic", "arms=[no_replay,rod,merge_0.6]",
    "domain.sources.dialect.max_bytes=200000",
    *(f"domain.sources.chain_{i}.max_bytes=40000" for i in range(9)), "pretrain.steps=40",
    "train.steps=200", "checkpoint.every=20",
]  # fmt: skip
# One "GPU" a node, so that the recipe's two processes are one on each of two nodes.
ON_SLURM = [
    "launcher=slurm", "launcher.grace_seconds=60", "cluster.gpu=pretended",
    "cluster.gpus_per_node=1", "cluster.cpu_cores=1", "cluster.cpu_stage_cores=1",
    "cluster.cpu_stage_memory_gib=1", "cluster.time=00:50:00",
]  # fmt: skip


def nemo_rod(*arguments: str, cluster: Cluster | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rod.cli", *arguments],
        env=cluster.environment if cluster else None,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@dataclass
class Chain:
    """A run on Slurm: its folder, the numbers of its jobs, and what `status` said meanwhile."""

    cluster: Cluster
    run_dir: Path
    said: dict[str, str]

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
        """A job of a higher partition takes both nodes."""
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        self.cluster.ask("sbatch", *urgent, "--wrap=sleep 5")
        self.wait_until_stopped(arm)

    def wait_until_stopped(self, arm: str) -> None:
        """Waits until an arm that was asked to stop says that it did."""
        wait_for(lambda: "stopped" in self.kinds(arm), 120, f"{arm} was not asked to stop")

    def wait(self, seconds: float = 3000) -> None:
        wait_for(lambda: not self.cluster.ask("squeue", "-h"), seconds, "jobs did not end")


def copy(run_dir: Path, *folders: str, to: Path) -> None:
    for folder in folders:
        subprocess.run(["cp", "-r", str(run_dir / folder), str(to / folder)], check=True)
