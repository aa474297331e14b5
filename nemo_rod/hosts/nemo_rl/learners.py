"""Two implementations of a step, behind one interface; both choose the same blocks.

    InWorkers   the workers choose themselves             needs the extension; no token crosses Ray
    InDriver    stock workers score, the driver chooses   any backend; tokens cross Ray

Shapes: C candidates, K chosen blocks (global), S tokens per block.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nemo_rod.corpus.store import BlockStore
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.remote import SETUP_SECONDS, call_all
from nemo_rod.hosts.nemo_rl.worker import Task, train_batch, update_metrics
from nemo_rod.selection import Choice
from nemo_rod.selection.arms import Arm
from nemo_rod.selection.dealing import deal
from nemo_rod.selection.held_out import source_losses
from nemo_rod.selection.references import NUM_PARTS


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

    def part_sums(self, block_ids: np.ndarray, eighths: int = NUM_PARTS) -> np.ndarray:
        """Returns the partial sums of whole blocks, which references need, float32 `[C, 8]`."""
        assert eighths == NUM_PARTS, "references are of whole blocks"
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


class InDriver:
    """Stock workers: the driver reads the blocks, requests log-probabilities, and chooses.

    `micro_batch_size` is of the blocks in one forward-backward pass of one replica.
    """

    def __init__(self, policy: Any, task: Task, *, micro_batch_size: int) -> None:
        self.policy, self.micro_batch_size = policy, micro_batch_size
        self.store = BlockStore(task.blocks)
        self.held_out = BlockStore(task.blocks, split="holdout")
        self.num_validation_blocks = task.validation_blocks
        self.selector = task.selector(self.store)
        self.loss = compat.loss_function()

    def step(self, step: int) -> tuple[Choice, dict[str, float]]:
        """Scores the candidates by log-probabilities, chooses, and sends the winners to train."""
        choice = self.selector.choose(step, LogprobScorer(self.policy, self.store))
        start = time.perf_counter()
        # the policy splits a batch into one contiguous run of rows per replica
        shares = deal(
            choice.block_ids,
            micro_batch_size=self.micro_batch_size,
            replicas=num_replicas(self.policy),
        )
        trained = self.policy.train(
            train_batch(self.store.checked_tokens(np.concatenate(shares))),
            self.loss,
            gbs=self.selector.batch_size,
            mbs=self.micro_batch_size,
        )
        return choice, update_metrics(trained["loss"], trained, time.perf_counter() - start)

    def update_flops(self, num_blocks: int) -> float | None:
        """Returns None: the policy's `train` has reported its own, where it could."""
        return None

    def validate(self) -> dict[str, float]:
        """Scores held-out blocks like candidates."""
        scorer = LogprobScorer(self.policy, self.held_out)
        return source_losses(scorer, self.held_out, num_blocks=self.num_validation_blocks)


Learner = InWorkers | InDriver


class LogprobScorer:
    """Scores blocks with a policy's stock `get_logprobs`."""

    def __init__(self, policy: Any, store: BlockStore) -> None:
        self.policy, self.store = policy, store

    def part_sums(self, block_ids: np.ndarray, eighths: int = NUM_PARTS) -> np.ndarray:
        """Returns the sums of the token losses over eighths of each block, float32 `[C, 8]`.

        Only whole blocks are scored: a policy's log-probabilities have no other length.

        NeMo-RL's log-probability at position j is that of token j, and 0 at position 0; a token
        loss belongs to the position that predicts it, one earlier.
        """
        assert eighths == NUM_PARTS, "check() refuses a prefix here"
        share = num_replicas(self.policy) * self.policy.cfg["logprob_batch_size"]
        padded = np.resize(block_ids, -(-len(block_ids) // share) * share)
        logprobs = self.policy.get_logprobs(train_batch(self.store.tokens(padded)))["logprobs"]
        loss_CS = -np.roll(logprobs.float().numpy()[: len(block_ids)], -1, axis=1)
        return loss_CS.reshape(len(block_ids), NUM_PARTS, -1).sum(axis=-1)


def num_replicas(policy: Any) -> int:
    """Returns the data-parallel size."""
    return policy.sharding_annotations.get_axis_size("data_parallel")


def make_learner(policy: Any, arm: Arm, config: dict[str, Any]) -> Learner:
    """Returns the learner that `rod.choose_in` selects."""
    rod = config["rod"]
    task = Task(
        blocks=rod["blocks"],
        arm=arm,
        references=tuple(rod["references"]) if arm.policy().needs_scores else (),
        scoring_micro_batch_size=rod["scoring"]["micro_batch_size"],
        validation_blocks=rod["validation"]["blocks"],
        on_nonfinite=rod["selection"]["on_nonfinite"],
    )
    if rod["choose_in"] == "workers":
        return InWorkers(policy, task, stall_seconds=rod["stall_seconds"])
    return InDriver(policy, task, micro_batch_size=config["policy"]["train_micro_batch_size"])
