"""A step as the driver sees it: the workers choose for themselves, and no token crosses Ray.

Shapes: C candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_rod.hosts.nemo_rl.remote import SETUP_SECONDS, call_all
from nemo_rod.hosts.nemo_rl.worker import Task
from nemo_rod.selection import Choice
from nemo_rod.selection.arms import Arm


class InWorkers:
    """The policy's workers, of a class that inherits `RoDWorkerMixin`, hold the selector.

    They are sent the task; without an arm in it they only score.
    """

    def __init__(self, policy: Any, task: Task, *, stall_seconds: float) -> None:
        self.policy, self.stall_seconds = policy, stall_seconds
        self.pools = task.arm.pools() if task.arm else None
        patience = max(stall_seconds, SETUP_SECONDS) if stall_seconds else 0.0
        call_all(policy, "rod_setup", stall_seconds=patience, task=task)

    def step(self, step: int) -> tuple[Choice, dict[str, float]]:
        """Sends the step number; returns the choice and metrics that the last rank reports."""
        assert self.pools is not None
        report = self._call("rod_step", step=step)[-1]
        metrics = report.pop("metrics")
        return Choice(pool=self.pools.pool(step), **report), metrics

    def validate(self) -> dict[str, float]:
        """Returns held-out losses, `validation/<role>/<source>/loss`."""
        return self._call("rod_validate")[-1]

    def part_sums(self, block_ids: np.ndarray) -> np.ndarray:
        """Returns the partial sums of whole blocks, which references need, float32 `[C, 8]`."""
        return self._call("rod_part_sums", block_ids=block_ids)[-1]

    def update_flops(self, num_blocks: int) -> float | None:
        """Returns the FLOPs of training on blocks, by the tracker of the policy's own `train`."""
        tracker = getattr(self.policy, "flops_tracker", None)
        if tracker is None:
            return None
        tracker.reset()
        tracker.track_batch([self.policy.cfg["max_total_sequence_length"]] * num_blocks)
        return tracker.total_flops

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        return call_all(self.policy, method, stall_seconds=self.stall_seconds, **arguments)


def num_replicas(policy: Any) -> int:
    """Returns the data-parallel size."""
    return policy.sharding_annotations.get_axis_size("data_parallel")


def make_learner(policy: Any, arm: Arm, config: dict[str, Any]) -> InWorkers:
    """Returns the learner of a configured arm."""
    rod = config["rod"]
    task = Task(
        blocks=rod["blocks"],
        arm=arm,
        references=tuple(rod["references"]) if arm.policy().needs_scores else (),
        scoring_micro_batch_size=rod["scoring"]["micro_batch_size"],
        validation_blocks=rod["validation"]["blocks"],
        on_nonfinite=rod["selection"]["on_nonfinite"],
    )
    return InWorkers(policy, task, stall_seconds=rod["stall_seconds"])
