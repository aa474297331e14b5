"""What stages need and this machine lacks, found before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from nemo_rod.config import Config
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.pythons import (
    can_be_found,
    num_gpus,
    python_with_megatron,
    sees_gpu,
)

# extra of nemo-rod that a stage needs -> the modules that it imports
NEEDS = {
    "": (),
    "data": ("tokenizers", "transformers"),
    "bridge": ("torch", "transformers", "safetensors", "megatron.core", "megatron.bridge"),
    "eval": ("torch", "safetensors"),
    "report": ("jinja2", "matplotlib", "vl_convert"),
}


def lacking(stages: Sequence[Stage], config: Config) -> Iterator[str]:
    """Yields a sentence about everything that stages need and lack here, with its cure.

    A queue's jobs find their GPUs and packages where they run, and so do workers in environments of
    their own.
    """
    launcher = launcher_of(config)
    if launcher.submits:
        return
    yield from _packages(stages, config)
    if launcher.environment and any(stage.runs_model for stage in stages):
        yield from _gpus(config)


def _gpus(config: Config) -> Iterator[str]:
    """Yields why the processes of this machine have no GPU each, if they are to have one."""
    named = config.cluster.gpu
    processes = config.parallel.world_size // Nodes.from_environment().count
    if named is None and (processes == 1 or not sees_gpu()):
        return
    found = num_gpus()
    if named is not None and not found:
        yield (
            f"cluster.gpu={named}, but torch sees no GPU on this machine: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or add cluster=null to run on the CPU."
        )
    elif 0 < found < processes:
        yield (
            f"parallel puts {processes} processes on this machine, where torch sees {found} "
            f"GPU{'s' if found > 1 else ''}: each needs one; choose a smaller layout, such as "
            "parallel=single."
        )


def _packages(stages: Sequence[Stage], config: Config) -> Iterator[str]:
    """Yields the packages that are not installed, with the stage and the extra that brings them.

    NeMo-RL, as a launcher, brings its own packages, and so does the environment of its workers.
    """
    missing: dict[str, str] = {}  # module -> extra
    names = []
    here = launcher_of(config).environment and python_with_megatron() == sys.executable
    for stage in stages:
        if stage.extra == "bridge" and not here:
            continue
        lacks = [module for module in NEEDS[stage.extra] if not can_be_found(module)]
        for module in lacks:
            missing.setdefault(module, stage.extra)
        names += [stage.name] if lacks else []
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        yield (
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which "
            f"{names[0]} needs{' first' if len(names) > 1 else ''}: without a "
            "GPU, run `make venv` in a checkout; with one, use an image of docs/images.md, or pip "
            f"install 'nemo-rod[{extras}]' where torch is installed."
        )
