"""Runs a configuration on a Ray cluster: the running one, or a new one on this machine."""

from __future__ import annotations

from typing import Any

from nemo_rod.hosts.nemo_rl import conversions
from nemo_rod.hosts.nemo_rl.policy import WorkerFailed, sentence


def run(command: str, config: dict[str, Any]) -> None:
    """Runs "train" or "reference" with a configuration that `settings` returns.

    Raises:
        RuntimeError: a worker failed; the message says which and why.
        Stopped: the run was asked to stop, and resumes when it is started again.
    """
    conversions.keep_apart(config["policy"]["model_name"], config["rod"]["out"])
    start_ray()
    from ray.exceptions import RayError

    from nemo_rod.hosts.nemo_rl.reference_losses import write_reference

    action = train if command == "train" else write_reference
    try:
        action(config)
    except RayError as error:  # from one of NeMo-RL's own calls
        raise WorkerFailed(sentence(error)) from error


def train(config: dict[str, Any]) -> None:
    """Trains one arm, resuming from its latest checkpoint."""
    from nemo_rod.hosts.nemo_rl import algorithm

    run = algorithm.setup(config)
    failed = True
    try:
        algorithm.rod_train(run)
        if config["rod"]["hf"]:
            algorithm.export(run)
        failed = False
    finally:
        run.close(force=failed)


def start_ray() -> None:
    """Joins the running Ray cluster, or starts one."""
    import ray
    from nemo_rl.distributed.virtual_cluster import init_ray

    if not ray.is_initialized():
        init_ray()
