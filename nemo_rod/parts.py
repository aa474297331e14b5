"""Parts, found by name: ours in one table of strings, others through entry points of packages.

    [project.entry-points."nemo_rod.policies"]      # in the pyproject.toml of any package
    newest = "my_package.policies:Newest"

A part is imported on demand, so the table is the only place of the house that names modules outside
it. Every kind has one protocol for ours and for others: docs/extending.md has
examples.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

FROM_FILES = ("policies", "scores")  # kinds that may also be named FILE.py:NAME

# kind -> name -> "module" or "module:attribute"
OURS: dict[str, dict[str, str]] = {
    # (**options) -> selection.policies.Policy
    "policies": {
        "joint": "nemo_rod.selection.policies:Joint",
        "fixed_share": "nemo_rod.selection.policies:FixedShare",
        "schedule": "nemo_rod.selection.schedule:Schedule",
        "odm": "nemo_rod.selection.odm:ODM",
    },
    # (loss_C, reference_C) -> score_C, float32 in nats per token
    "scores": {"reducible_loss": "nemo_rod.selection.policies:reducible_loss"},
    # (SourceSpec) -> list[corpus.formats.Input]
    "readers": {
        "text": "nemo_rod.corpus.formats:read_text",
        "jsonl": "nemo_rod.corpus.formats:read_jsonl",
        "parquet": "nemo_rod.corpus.adapters.parquet_tables:read_parquet",
        "huggingface": "nemo_rod.corpus.adapters.hub_datasets:read_dataset",
        "megatron": "nemo_rod.corpus.adapters.indexed_datasets:read_indexed",
        "debian": "nemo_rod.lab.toy.debian:read_packages",
        "synthetic": "nemo_rod.corpus.adapters.synthetic:read_generators",
        "generated": "nemo_rod.lab.generated.reader:read_generated",
    },
    # subclasses of run.launch.local.Local
    "launchers": {
        "local": "nemo_rod.run.launch.local:Local",
        "slurm": "nemo_rod.run.launch.slurm:Slurm",
        "ray": "nemo_rod.hosts.ray.launcher:RayOnSlurm",
        "nemo_rl": "nemo_rod.hosts.nemo_rl.launcher:NemoRL",
    },
    # (folder, run_name) -> megatron.callbacks.show_metrics.Logger; None: one of the trainer's own
    "loggers": {"tensorboard": "", "wandb": "", "mlflow": ""},
    # modules with install(...) and reference(...); see hosts.swap_in
    "hosts": {
        "megatron_bridge": "nemo_rod.hosts.megatron_bridge",
        "megatron_lm": "nemo_rod.hosts.megatron_lm",
        "nemo2": "nemo_rod.hosts.nemo2",
    },
    # modules that make NVIDIA's stack work where something is missing; see cpu/__init__.py. The
    # house uses these alone, so packages cannot add any
    "platforms": {"cpu": "nemo_rod.cpu", "forks": "nemo_rod.cpu.forks"},
    # (run.stages.Stages) -> list[run.handover.Stage]: the stages beside those of run.stages
    "stages": {
        "merge": "nemo_rod.lab.merge:merge_stages",
        "evaluate": "nemo_rod.run.evaluate:evaluate_stages",
        "report": "nemo_rod.lab.report.stage:report_stages",
    },
    # (run.stages.Stages) -> list[run.handover.Stage]: those of a command on one saved step
    "saved_steps": {
        "export": "nemo_rod.lab.exports:export_stages",
        "evaluate": "nemo_rod.lab.exports:evaluate_stages",
    },
    # modules with FILE, PARTIAL, wanted, check, missing and measure; see run.evaluate
    "measurements": {"losses": "nemo_rod.run.held_out_losses", "tasks": "nemo_rod.lab.tasks.stage"},
    # (Config) -> str: the remaining time of a run, such as "12 min"; "" if unknown
    "estimates": {"plan": "nemo_rod.lab.status:time_left"},
    # (Config, list[run.handover.Stage]) -> context manager: shows a run on a terminal
    "screens": {"live": "nemo_rod.lab.live:live"},
    # (Config) -> str: the size of a run to be submitted; refuses one that cannot work there
    "checks": {"memory": "nemo_rod.lab.plan.command:check_before_submitting"},
    # (Config) -> None: commands that take a recipe in Hydra's grammar, besides the stages
    "recipe_commands": {
        "run": "nemo_rod.commands.run_stages:run",
        "plan": "nemo_rod.lab.plan.command:plan",
        "rehearse": "nemo_rod.lab.rehearsal.command:rehearse",
        "probe": "nemo_rod.lab.probe.command:probe",
        "time": "nemo_rod.lab.probe.speed:time",
        "known": "nemo_rod.lab.smollm2.known_texts:measure",
    },
    # modules with declare(parser): commands that take paths
    "commands": {
        "init": "nemo_rod.lab.own_folder",
        "recipes": "nemo_rod.lab.recipe_list",
        "completion": "nemo_rod.lab.completion",
        "status": "nemo_rod.lab.status",
        "serve": "nemo_rod.lab.report.serve",
        "sample": "nemo_rod.lab.sample",
        "cancel": "nemo_rod.lab.cancel",
        "inspect": "nemo_rod.lab.inspect.command",
        "curriculum": "nemo_rod.lab.curricula",
        "import": "nemo_rod.lab.authors.command",
        "doctor": "nemo_rod.lab.doctor",
        "train": "nemo_rod.hosts.nemo_rl.train_command",
        "reference": "nemo_rod.hosts.reference_command",
        "merge": "nemo_rod.lab.merge",
        "report": "nemo_rod.lab.report.job_folder",
        "paper": "nemo_rod.lab.reproduce",
    },
    # dataclasses: sections of the configuration that belong to parts
    "sections": {
        "tasks": "nemo_rod.lab.tasks.section:Tasks",
        "report": "nemo_rod.lab.report.section:Report",
        "plan": "nemo_rod.lab.plan.section:Plan",
        "rehearsal": "nemo_rod.lab.rehearsal.section:Rehearsal",
        "probe": "nemo_rod.lab.probe.section:Probe",
        "nemo_rl": "builtins:dict",  # keys of NeMo-RL itself
    },
}


def names(kind: str) -> list[str]:
    """Returns the names that are registered for a kind of part, ours first."""
    return [*OURS[kind], *(name for name in installed(kind) if name not in OURS[kind])]


def load(kind: str, name: str, *, key: str = "") -> Any:
    """Imports a part and returns it.

    The error names the configuration key.

    Raises:
        ValueError: no part has the name, or the package that registered it cannot provide it.
    """
    if file := file_of(name):
        return _from_file(file, name.partition(":")[2], kind, key)
    if name in OURS[kind]:
        home, _, attribute = OURS[kind][name].partition(":")
        module = importlib.import_module(home)
        return getattr(module, attribute) if attribute else module
    others = installed(kind)
    where = f"{key}={name}" if key else f"'{name}'"
    if name not in others:
        raise ValueError(
            f"{where} names none of the {kind.replace('_', ' ')}"
            f"{did_you_mean(name, names(kind))}: expected one of "
            f"{', '.join(names(kind))}; docs/extending.md says how a package adds one."
        )
    try:
        return others[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{where} is registered as {others[name].value}, which cannot be imported ({error}): "
            "correct or remove the package that registers it."
        ) from error


def file_of(name: str) -> Path | None:
    """Returns the file of a part that is named FILE.py:NAME; None for a registered name."""
    file, sign, attribute = name.rpartition(":")
    return Path(file) if sign and attribute and file.endswith(".py") else None


@functools.cache
def _from_file(file: Path, attribute: str, kind: str, key: str) -> Any:
    """Imports FILE.py once a process and returns what it calls NAME."""
    where = f"{key}={file}:{attribute}"
    if kind not in FROM_FILES:
        raise ValueError(f"{where} names a file, but {kind} are named by what packages register.")
    if not file.is_file():
        raise ValueError(f"{where} names a file that is not there: correct the path.")
    name = f"nemo_rod_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # for its dataclasses
    try:
        spec.loader.exec_module(module)
        return getattr(module, attribute)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} cannot be imported ({reason}): correct the file.") from error


def load_all(kind: str) -> list[Any]:
    """Imports all registered parts of a kind."""
    return [load(kind, name) for name in names(kind)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the name nearest to a word; "" if none is near."""
    from difflib import get_close_matches

    names = {str(name).lower(): name for name in known}
    near = get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


@functools.cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Returns the entry points of installed packages for a kind of part, by name; cached."""
    return {point.name: point for point in entry_points(group=f"nemo_rod.{kind}")}
