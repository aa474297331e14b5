"""NeMo-RL's policy as the driver uses it: starts the workers, and calls all of them at once.

A call ends promptly and names the cause when a worker fails. The workers choose for themselves, so
no token crosses Ray.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.files import digest
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.run.processes.pythons import worker_python

FOLDER = "NRL_MEGATRON_CHECKPOINT_DIR"  # NeMo-RL's; its workers get the driver's environment
_PLACE = "NEMO_ROD_CONVERSIONS"  # value of FOLDER before the first run of this process
GRACE_SECONDS = 5.0  # time for the other workers to report, once one has failed
SETUP_SECONDS = 600.0  # minimum time limit of the first call, in which workers still import


class WorkerFailed(RuntimeError):
    """A worker raised, died or stalled; the message names the rank and the reason."""


@dataclass
class Workers:
    """The workers of NeMo-RL's policy, of a class that inherits `RoDWorkerMixin`."""

    policy: Any
    count: int
    stall_seconds: float  # maximum wait for an answer, 0 for no limit

    def call(self, method: str, *, stall_seconds: float | None = None, **arguments: Any) -> Any:
        """Runs a method on every worker and returns the result of the last rank.

        Args:
            method: name of a method of the worker class.
            stall_seconds: maximum wait for this answer, 0 for no limit; None for the usual one.
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
                        f"{method}: no answer of rank {waiting} for {limit:g} s "
                        "(launcher.stall_seconds)"
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

    def update_flops(self, num_blocks: int) -> float | None:
        """Returns the FLOPs of training on blocks, by the policy's own counter if it has one."""
        tracker = getattr(self.policy, "flops_tracker", None)
        if tracker is None:
            return None
        tracker.reset()
        tracker.track_batch([self.policy.cfg["max_total_sequence_length"]] * num_blocks)
        return tracker.total_flops


@contextmanager
def using_workers(
    config: dict[str, Any],
    job: TrainJob | ReferenceJob,
    *,
    resume_paths: tuple[Path | None, Path | None] = (None, None),
) -> Iterator[Workers]:
    """Starts the policy's workers, and ends them after the block. Ray must be running.

    After a failure workers may hang: they are killed without asking.

    Args:
        config: the configuration.
        job: the job.
        resume_paths: weights and optimizer state to load, if any.

    Raises:
        WorkerFailed: a worker refuses; the message names the reason.
    """
    import ray
    from nemo_rl.algorithms.utils import get_tokenizer, set_seed
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.models.policy.lm_policy import Policy

    policy_cfg, trains = config["policy"], isinstance(job, TrainJob)
    set_seed(job.config.seed)
    steps = job.config.train.steps if trains else 1
    policy_cfg["megatron_cfg"]["train_iters"] = steps  # required even to score only
    use_gpus = ray.cluster_resources().get("GPU", 0) > 0
    cluster = compat.make_cluster(config["cluster"], use_gpus=use_gpus)
    # for a class that it does not know, NeMo-RL would build an environment without this package
    python = worker_python()
    ACTOR_ENVIRONMENT_REGISTRY[config["worker"]] = str(python) if python else PY_EXECUTABLES.SYSTEM
    policy = Policy(
        cluster=cluster,
        config=policy_cfg,
        tokenizer=get_tokenizer(policy_cfg["tokenizer"]),
        weights_path=resume_paths[0],
        optimizer_path=resume_paths[1],
        init_optimizer=trains,
        init_reference_model=False,
        worker_extension_cls_fqn=config["worker"],
    )
    failed = True
    try:
        stall = job.stall_seconds
        workers = Workers(policy, cluster.world_size(), stall)
        limit = max(stall, SETUP_SECONDS) if stall else 0.0
        # not the job itself: the class of its configuration is made in this process
        workers.call(
            "rod_setup",
            stall_seconds=limit,
            blocks=job.blocks,
            scoring_micro_batch_size=job.config.scoring.micro_batch_size,
            arm=job.arm if isinstance(job, TrainJob) else None,
            references=job.references if isinstance(job, TrainJob) else [],
            on_nonfinite=job.config.selection.on_nonfinite,
            steps=steps,
        )
        yield workers
        failed = False
    finally:
        cleanup = None if failed else "shutdown"
        policy.worker_group.shutdown(cleanup_method=cleanup, force=failed)
        cluster.shutdown()


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


def separate_conversions(
    model: str, out: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Sets the folder of checkpoints that NeMo-RL converts from Hugging Face's form.

    NeMo-RL stores a conversion under the model's name or path and reuses it. A local checkpoint
    that was made anew would thus be trained in its old state, so every state gets a folder; and
    NeMo-RL's default, in one node's home, is not visible to the other nodes.

    Args:
        model: name or folder of the model.
        out: folder of the run, which every node sees; used if neither NeMo-RL's variable nor
            HF_HOME names a place.
        environment: variables of the environment.
    """
    place = environment.get(_PLACE) or environment.get(FOLDER, "").strip()
    if not place:
        home = environment.get("HF_HOME", "").strip()
        place = str(Path(home) / "nemo_rl") if home else str(Path(out).absolute() / "converted")
    # otherwise the next run of this process would take this run's folder for the common place
    environment[_PLACE] = place
    folder = Path(model)
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        stats = [(str(file.relative_to(folder)), file.stat()) for file in files]
        state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        place = str(Path(place) / digest(json.dumps(state).encode())[:12])
    environment[FOLDER] = place
