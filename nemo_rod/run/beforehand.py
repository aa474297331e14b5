"""What stages need and this machine lacks, found before anything starts: first what is local."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_rod import parts
from nemo_rod.config import Config
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.formats import TextFile
from nemo_rod.corpus.tokenizer import BYTE
from nemo_rod.installation import page, pip_install
from nemo_rod.run import hub
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.model_jobs import ModelJobs, refuse_unfit
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.pythons import can_be_found, num_gpus, python_with_megatron, sees_gpu
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import trained_arms

# extra of nemo-rod that a stage needs -> the modules that it imports
NEEDS = {
    "": (),
    "data": ("tokenizers", "transformers"),
    "bridge": ("torch", "transformers", "safetensors", "megatron.core", "megatron.bridge"),
    "eval": ("torch", "safetensors"),
    "report": ("jinja2",),  # without vl_convert, the page has no pictures
}
_FOLDER = "expected a folder, or a name or NAME@REVISION on the Hugging Face hub"


class Lack(NamedTuple):
    """Something that is lacking, or wrong."""

    sentence: str  # names the fault and its cure
    everywhere: bool  # whether another machine would lack it too, as far as this one can tell


def lacking(stages: Sequence[Stage], config: Config) -> list[Lack]:
    """Returns what these stages need and lack; the hub is asked only if nothing local is lacking.

    A queue's jobs find their GPUs and packages where they run, and so do workers in environments of
    their own.
    """
    launcher, names = launcher_of(config), {stage.name for stage in stages}
    lacks: list[Lack] = []
    if not (launcher.submits and config.cluster.mounts):  # files have other names inside mounts
        checks = {"prepare": _texts, "base": _model}
        found = [line for name in checks if name in names for line in checks[name](config)]
        lacks += [Lack(line, True) for line in dict.fromkeys(found)]
        jobs = ModelJobs(config, RunFolder(Path(config.run_dir), config.recipe))
        for arm in trained_arms(config):
            file = None if arm.variant.follow else jobs.curriculum_file(arm)
            # below runs/, the run of another recipe may be still to make it
            if arm.name in names and file and (file.exists() or file.parts[0] != "runs"):
                try:
                    refuse_unfit(file, arm, store=None)
                except ValueError as error:
                    lacks.append(Lack(str(error), True))
    for name in parts.names("checks"):
        try:
            parts.load("checks", name)(config, stages)
        except (ValueError, OSError) as error:
            lacks.append(Lack(str(error), isinstance(error, ValueError)))
    if launcher.submits:
        return lacks
    lacks += [Lack(line, False) for line in _packages(stages, config)]
    if launcher.environment and any(stage.runs_model for stage in stages):
        lacks += [Lack(line, False) for line in _gpus(config)]
    if not lacks and can_be_found("huggingface_hub"):
        lacks += [Lack(*refusal) for refusal in hub.refusals(hub.repos(config, names))]
    return lacks


def _texts(config: Config) -> Iterator[str]:
    """Yields what is wrong with the names of tokenizer and text, and with the files' beginnings."""
    name = config.domain.tokenizer
    if name == config.model.hf:
        yield from _model(config)
    elif Path(name).expanduser().is_file():
        yield f"domain.tokenizer={name} is a file: give the folder that it is in."
    elif not (name == BYTE or hub.is_here(name) or hub.is_name(name)):
        yield f"domain.tokenizer={name} does not exist: {_FOLDER}."
    for spec in config.domain.specs:
        if spec.path is not None and not (hub.is_here(spec.path) or hub.is_name(spec.path)):
            yield f"domain.sources.{spec.name}.path={spec.path} does not exist: {_FOLDER}."
        if spec.kind not in ("text", "jsonl", "parquet", "megatron") or any(
            "://" in str(file) for file in spec.files
        ):
            continue
        try:
            first, *others = open_inputs(spec)
            next(iter(first.chunks() if isinstance(first, TextFile) else first.records(None)), None)
            if closed := [item.place for item in others if not os.access(item.place, os.R_OK)]:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), closed[0])
        except OSError as error:
            yield f"source {spec.name}: {error.filename}: {error.strerror}."
        except ValueError as error:
            line = str(error).rstrip(".")
            yield f"{line}." if spec.name in line else f"source {spec.name}: {line}."
        except ModuleNotFoundError as error:
            cure = pip_install("data")
            yield f"source {spec.name} needs {error.name}, which is not installed: {cure}."


def _model(config: Config) -> Iterator[str]:
    """Yields why model.hf is no checkpoint, as far as its folder or name tells."""
    if (name := config.model.hf) is None:
        return
    folder = Path(name).expanduser()
    if not folder.exists():
        if not hub.is_name(name):
            yield f"model.hf={name} does not exist: {_FOLDER}."
        return
    lacks = [each for each in ("config.json", "*.safetensors") if not any(folder.glob(each))]
    for pattern in lacks[:1]:
        yield f"model.hf={name} holds no {pattern}: expected a Hugging Face checkpoint."


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
    """Yields the packages that are missing here, with the stage that needs them."""
    missing: dict[str, str] = {}  # module -> extra
    names = []
    here = launcher_of(config).environment and python_with_megatron() == sys.executable
    for stage in stages:
        if stage.extra == "bridge" and not here:  # NeMo-RL and other environments bring it
            continue
        lacks = [module for module in NEEDS[stage.extra] if not can_be_found(module)]
        missing.update((module, stage.extra) for module in lacks if module not in missing)
        names += [stage.name] if lacks else []
    if missing:
        extras = ",".join(dict.fromkeys(missing.values()))
        yield (
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, which "
            f"{names[0]} needs{' first' if len(names) > 1 else ''}: without a GPU, run `make venv` "
            f"in a clone; with one, use an image of {page('images')}, or {pip_install(extras)} "
            "where torch is installed."
        )
