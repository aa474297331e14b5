"""The Python of a job's processes: NeMo-RL's image has a separate one with Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def worker_python() -> Path | None:
    """Returns the Python of NeMo-RL's Megatron workers; None if it is the driver's own.

    NeMo-RL's image has an environment of these workers in NEMO_RL_VENV_DIR.
    """
    if "NEMO_RL_VENV_DIR" not in os.environ:
        return None
    python = Path(os.environ["NEMO_RL_VENV_DIR"]) / MEGATRON_WORKER / "bin" / "python"
    return python if python.exists() else None


def python_with_megatron() -> str:
    """Returns the Python that runs models: this one, unless only the workers' has Megatron."""
    workers = worker_python()
    return sys.executable if workers is None or can_be_found("megatron.bridge") else str(workers)


def can_be_found(module: str) -> bool:
    """Returns whether a module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a missing parent
        return False


def sees_gpu() -> bool:
    """Returns whether this machine shows a GPU; torch need not be imported to know."""
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()  # WSL's device


def num_gpus() -> int:
    """Returns the number of GPUs that torch can use in the Python that runs models."""
    if not sees_gpu() or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return 0
    asks = "import torch.cuda as c; print(c.device_count() if c.is_available() else 0)"
    command = [python_with_megatron(), "-P", "-c", asks]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return int(done.stdout) if done.returncode == 0 else 0
