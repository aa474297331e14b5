"""NeMo-RL's policy as the driver uses it: starts the workers, and calls all of them at once.

A call ends promptly and names the cause when a worker fails. The workers choose for themselves, so
no token crosses Ray.

Shapes: C candidates.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.worker import Task
from nemo_rod.selection import Choice

GRACE_SECONDS = 5.0  # time for the other workers to report, once one has failed
SETUP_SECONDS = 600.0  # minimum time limit of the first call, in which workers still import


class WorkerFailed(RuntimeError):
    """A worker raised, died or stalled; the message names the rank and the reason."""


class Workers:
    """The policy's workers, of a class that inherits `RoDWorkerMixin`, which hold the selector.

    Without an arm in their task they only score.
    """

    def __init__(self, policy: Any, task: Task, *, stall_seconds: float) -> None:
        self.policy, self.stall_seconds = policy, stall_seconds
        limit = max(stall_seconds, SETUP_SECONDS) if stall_seconds else 0.0
        self.call("rod_setup", stall_seconds=limit, task=task)

    def step(self, step: int) -> tuple[Choice, dict[str, float]]:
        """Sends the step number; returns the choice and metrics that the last rank reports."""
        choice, metrics = self.call("rod_step", step=step)
        return choice, metrics

    def validate(self) -> dict[str, float]:
        """Returns held-out losses, `validation/<role>/<source>/loss`."""
        return self.call("rod_validate")

    def losses_at(self, block_ids: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
        """Returns the losses of blocks over several lengths, for references, float32 `[C, L]`."""
        return self.call("rod_losses_at", block_ids=block_ids, lengths=lengths)

    def update_flops(self, num_blocks: int) -> float | None:
        """Returns the FLOPs of training on blocks, by the policy's own counter if it has one."""
        tracker = getattr(self.policy, "flops_tracker", None)
        if tracker is None:
            return None
        tracker.reset()
        tracker.track_batch([self.policy.cfg["max_total_sequence_length"]] * num_blocks)
        return tracker.total_flops

    def call(self, method: str, *, stall_seconds: float | None = None, **arguments: Any) -> Any:
        """Runs a method on every worker and returns the result of the last rank.

        Args:
            method: name of a method of the worker class.
            stall_seconds: maximum wait for an answer, 0 for no limit; None for the policy's.
            arguments: arguments of the method, the same on every rank.

        Raises:
            WorkerFailed: a worker failed; raised at once, although others may wait for it forever.
        """
        import ray
        from ray.exceptions import RayActorError

        def order(error: Exception) -> int:
            """Sorts a failure by how likely it is the cause of the others, the likeliest first."""
            if isinstance(error, RayActorError):  # the process died
                return 0
            cause = getattr(error, "cause", None)
            if isinstance(cause, ValueError):  # it refused something
                return 1
            lost_peer = isinstance(cause, RuntimeError) and "onnection" in str(cause)
            return 3 if lost_peer else 2

        limit = self.stall_seconds if stall_seconds is None else stall_seconds
        futures = self.policy.worker_group.run_all_workers_single_data(method, **arguments)
        ranks = {future: rank for rank, future in enumerate(futures)}
        pending, failures = list(futures), dict[int, Exception]()
        deadline = time.monotonic() + limit if limit else None
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            if not done:
                if not failures:
                    waiting = ", ".join(str(ranks[future]) for future in pending)
                    raise WorkerFailed(
                        f"{method}: no answer of rank {waiting} for {limit:g} s (rod.stall_seconds)"
                    )
                break
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                failures.setdefault(ranks[done[0]], error)
                soon = time.monotonic() + GRACE_SECONDS
                deadline = soon if len(failures) == 1 or deadline is None else min(deadline, soon)
        if failures:
            rank = min(failures, key=lambda rank: order(failures[rank]))
            raise WorkerFailed(f"rank {rank}: {sentence(failures[rank])}") from failures[rank]
        return ray.get(futures)[-1]


def make_policy(
    config: dict[str, Any],
    *,
    resume_paths: tuple[Path | None, Path | None] = (None, None),
    train: bool = True,
) -> tuple[Any, Any]:
    """Starts the policy workers, to train or only to score; returns NeMo-RL's policy and cluster.

    They load the weights and the optimizer state of `resume_paths`, if any.
    """
    import ray
    from nemo_rl.algorithms.utils import get_tokenizer, set_seed
    from nemo_rl.models.policy.lm_policy import Policy

    rod, policy_cfg = config["rod"], config["policy"]
    set_seed(rod["seed"])
    use_gpus = ray.cluster_resources().get("GPU", 0) > 0
    cluster = compat.make_cluster(config["cluster"], use_gpus=use_gpus)
    compat.register_worker(rod["worker"])
    policy = Policy(
        cluster=cluster,
        config=policy_cfg,
        tokenizer=get_tokenizer(policy_cfg["tokenizer"]),
        weights_path=resume_paths[0],
        optimizer_path=resume_paths[1],
        init_optimizer=train,
        init_reference_model=False,
        worker_extension_cls_fqn=rod["worker"],
    )
    return policy, cluster


def sentence(error: Exception) -> str:
    """Returns the message of a failed call, without Ray's and Python's traceback."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "creation task" in lines[0]:  # a traceback that ends with the error
            return f"could not start: {lines[-1]}"
        return f"its process died ({' '.join(lines)[:300]})"
    cause = getattr(error, "cause", None) or error
    kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
    return kind + " ".join(str(cause).split())
