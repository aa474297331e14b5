"""The Python of a job's processes: NeMo-RL's image has a separate one with Megatron."""

from __future__ import annotations

import os
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
    return any(Path("/dev").glob("nvidia[0-9]*"))
