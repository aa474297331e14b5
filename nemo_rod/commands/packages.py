"""Names all missing packages of a run in one sentence, before it begins."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from nemo_rod.config import Config
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.processes.pythons import python_with_megatron

# extra of nemo-rod that a stage needs -> the modules that it imports
_NEEDS = {
    "": (),
    "data": ("tokenizers", "transformers"),
    "bridge": ("torch", "transformers", "safetensors", "megatron.core", "megatron.bridge"),
    "eval": ("torch", "safetensors"),
    "report": ("jinja2", "matplotlib"),
}


def check_packages(stages: Iterable[Stage], config: Config) -> None:
    """Refuses stages whose packages are not all installed.

    NeMo-RL, as a launcher, brings its own packages, and so does the environment of its workers.

    Raises:
        ValueError: naming the packages, the stage that needs them, and the extras that bring them.
    """
    missing: dict[str, str] = {}  # module -> extra
    names = []
    here = launcher_of(config).environment and python_with_megatron() == sys.executable
    for stage in stages:
        if stage.extra == "bridge" and not here:
            continue
        lacks = [module for module in _NEEDS[stage.extra] if not can_be_found(module)]
        for module in lacks:
            missing.setdefault(module, stage.extra)
        names += [stage.name] if lacks else []
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which "
            f"{names[0]} needs{' first' if len(names) > 1 else ''}: pip install "
            f"'nemo-rod[{extras}]', run `make venv` in a checkout on a machine without a GPU, or "
            "use an image of docs/images.md."
        )


def can_be_found(module: str) -> bool:
    """Returns whether a module is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a missing parent
        return False
