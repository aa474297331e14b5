"""Runs a configuration on a Ray cluster: the running one, or a new one on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from nemo_rod.files import digest
from nemo_rod.hosts.nemo_rl.policy import WorkerFailed, sentence

FOLDER = "NRL_MEGATRON_CHECKPOINT_DIR"  # NeMo-RL's; its workers get the driver's environment
_PLACE = "NEMO_ROD_CONVERSIONS"  # value of FOLDER before the first run of this process


def run(command: str, config: dict[str, Any]) -> None:
    """Runs "train" or "reference" with a configuration that `settings` returns.

    Raises:
        RuntimeError: a worker failed; the message names it and the reason.
        Stopped: the run was asked to stop, and resumes when it is started again.
    """
    separate_conversions(config["policy"]["model_name"], config["rod"]["out"])
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
            folder = Path(config["rod"]["out"]) / "hf"
            run.workers.call("rod_export", folder=str(folder))
        failed = False
    finally:
        run.close(force=failed)


def start_ray() -> None:
    """Joins the running Ray cluster, or starts one."""
    import ray
    from nemo_rl.distributed.virtual_cluster import init_ray

    if not ray.is_initialized():
        init_ray()


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
