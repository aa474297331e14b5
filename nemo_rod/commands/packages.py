"""Refuses to begin a run whose packages are not installed: all of them in one sentence."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from nemo_rod.config import Launcher
from nemo_rod.run.handover import Stage
from nemo_rod.run.processes.pythons import python_with_megatron

_OF_MODELS = ("torch", "transformers", "safetensors", "megatron.core", "megatron.bridge")
# command of a stage -> the extra of nemo-rod and the modules that it imports
_NEEDS = {
    "prepare": ("data", ("tokenizers", "transformers")),
    "pretrain": ("bridge", _OF_MODELS),
    "reference": ("bridge", _OF_MODELS),
    "train": ("bridge", _OF_MODELS),
    "export": ("bridge", _OF_MODELS),
    "evaluate": ("bridge", _OF_MODELS),
    "merge": ("eval", ("torch", "safetensors")),
    "report": ("report", ("jinja2", "matplotlib")),
}


def check_packages(stages: Iterable[Stage], launcher: Launcher) -> None:
    """Refuses stages that would end in a missing package, before the first of them begins.

    NeMo-RL, as a launcher, brings its own packages, and so does the environment of its workers.

    Raises:
        ValueError: naming the packages, the stage that needs them, and the extras that bring them.
    """
    missing: dict[str, str] = {}  # module -> extra
    names = []
    for stage in stages:
        extra, modules = _NEEDS[stage.command.split()[0]]
        elsewhere = launcher.kind == "nemo_rl" or python_with_megatron() != sys.executable
        if elsewhere and extra == "bridge":
            continue
        lacks = [module for module in modules if not can_be_found(module)]
        for module in lacks:
            missing.setdefault(module, extra)
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
    """Returns whether a module can be imported, as far as that shows without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a missing parent
        return False
