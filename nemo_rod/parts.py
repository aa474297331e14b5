"""Parts, found by name: the house's own in one table, all others through entry points of packages.

    [project.entry-points."nemo_rod.policies"]      # in the pyproject.toml of any package
    newest = "my_package.policies:Newest"

The rooms beside the house register theirs in the same way, in nemo_rod's own pyproject.toml, and
the house works without them. Every kind has one protocol for ours and for others; docs/extending.md
has examples. A part is imported on demand.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from nemo_rod.installation import config_folder, page

FAILURES = (Exception, SystemExit)  # by which others' code may end what it is called for
FROM_FILES = ("policies", "scores", "readers")  # kinds that may also be named FILE.py:NAME
SHIPPED = {"recipe/scripts/debian_text.py:read_packages"}  # ours, which a folder may name, too

# kind -> name -> "module" or "module:attribute"
HOUSE: dict[str, dict[str, str]] = {
    # (**options) -> selection.policies.Policy
    "policies": {
        "joint": "nemo_rod.selection.policies:Joint",
        "fixed_share": "nemo_rod.selection.policies:FixedShare",
        "mix": "nemo_rod.selection.mix:Mix",
        "schedule": "nemo_rod.selection.schedule:Schedule",
    },
    # (loss_C, reference_C) -> score_C, float32 in nats per token
    "scores": {"reducible_loss": "nemo_rod.selection.policies:reducible_loss"},
    # (Config, name) -> dict | None: the variant that an arm's name means
    "arms": {},
    # (SourceSpec) -> list[corpus.formats.Input]
    "readers": {
        "text": "nemo_rod.corpus.formats:read_text",
        "jsonl": "nemo_rod.corpus.formats:read_jsonl",
        "parquet": "nemo_rod.corpus.adapters.parquet_tables:read_parquet",
        "huggingface": "nemo_rod.corpus.adapters.hub_datasets:read_dataset",
        "megatron": "nemo_rod.corpus.adapters.indexed_datasets:read_indexed",
        "synthetic": "nemo_rod.corpus.adapters.synthetic:read_generators",
    },
    # (weight, provider) -> terms.Term: what training has beside the loss of the next token
    "terms": {},
    # subclasses of corpus.encode.Encoder, of which the first reads and tokenises
    "encoders": {},
    # subclasses of run.launch.local.Local
    "launchers": {
        "local": "nemo_rod.run.launch.local:Local",
        "slurm": "nemo_rod.run.launch.slurm:Slurm",
    },
    # (folder, run_name) -> megatron.callbacks.show_metrics.Logger; "": one of the trainer's own
    "loggers": {"tensorboard": "", "wandb": "", "mlflow": ""},
    # (run.stages.Stages) -> list[run.handover.Stage]: the stages beside those of run.stages
    "stages": {"evaluate": "nemo_rod.run.evaluate:evaluate_stages"},
    # run.evaluate.Measurement
    "measurements": {"losses": "nemo_rod.run.held_out_losses"},
    # (Config) -> None: commands that take a recipe in Hydra's grammar, besides the stages
    "recipe_commands": {"run": "nemo_rod.commands.run_stages:run"},
    # (run.stages.Stages) -> list[run.handover.Stage]: those of a command with step=N
    "saved_step_commands": {},
    # modules with declare(parser): commands that take paths
    "commands": {},
    # dataclasses: sections of the configuration that belong to parts
    "sections": {},
    # (Choice, source_C, names) -> {"<part>/<metric>": value}: metrics of a step; see competition.py
    "metrics": {"rod": "nemo_rod.selection.competition:selection_metrics"},
    # (list of (run, results)) -> lab.report.figures.picture.Picture | None
    "figures": {},
    # modules with install(...) and reference(...), which `nemo_rod.install` calls
    "hosts": {},
    # (Config, list[run.handover.Stage]) -> str: the size of stages to be submitted; refuses those
    # that cannot work by a ValueError, and by an OSError if they cannot on this machine
    "checks": {},
    # (Config) -> str: the remaining time of a run, such as "12 min"; "" if unknown
    "time_left": {},
    # modules with prepare(), prepare_bridge() and adapt(provider): what NVIDIA's stack lacks here
    "stand_ins": {},
    # (program, environment, open files) -> run.processes.torchrun.Running: `python -m` on CPU
    "process_starters": {},
    # (config.yaml of a launch, words) -> words of a command on that run without its recipe
    "folders": {},
    # names in `nemo_rod` itself, beside those of __init__.py
    "public_names": {},
}
_OBJECTS = ("commands", "hosts", "measurements", "stand_ins", "public_names")  # called by a member
_PACKAGE = Path(__file__).parent


def names(kind: str) -> list[str]:
    """Returns the names that are registered for a kind of part, ours first."""
    ours = {**HOUSE[kind], **beside(kind)}
    return [*ours, *(name for name in other_parts(kind) if name not in ours)]


def load(kind: str, name: str, *, key: str = "") -> Any:
    """Imports a part and returns it.

    The error names the configuration key.

    Raises:
        ValueError: no part has the name, the package or file that has it cannot provide it, or what
            it provides cannot be called.
    """
    if name in HOUSE[kind]:
        return EntryPoint(name, HOUSE[kind][name], kind).load()
    if name in beside(kind):
        return beside(kind)[name].load()
    others, file = other_parts(kind), file_of(name)
    where = f"{key}={name}" if key else f"'{name}'"
    if file is None and name not in others:
        raise ValueError(
            f"{where} names none of the {kind.replace('_', ' ')}"
            f"{did_you_mean(name, names(kind))}: expected one of "
            f"{', '.join(names(kind))}; {page('extending')} says how a package adds one."
            f"{install_hint()}"
        )
    if file is not None and kind not in FROM_FILES:
        raise ValueError(f"{where} names a file, but {kind} are named by what packages register.")
    if file is not None and not file.is_file():
        raise ValueError(f"{where} names a file that is not there: correct the path.")
    registered = "" if file else f" is registered as {others[name].value}, which"
    cure = "correct the file" if file else "correct or remove the package that registers it"
    if " and " in registered:
        raise ValueError(f"{where}{registered} are two parts: remove a package that has one.")
    try:
        part = getattr(_module(file), name.rpartition(":")[2]) if file else others[name].load()
    except FAILURES as error:
        kind_of = f"{type(error).__name__}: " if file or not isinstance(error, ImportError) else ""
        raise ValueError(
            f"{where}{registered} cannot be imported ({kind_of}{error}): {cure}."
        ) from error
    if kind not in _OBJECTS and not callable(part):
        raise ValueError(
            f"{where}{registered} is an object of {type(part).__name__}, expected a class or a "
            f"function: {cure}."
        )
    return part


def file_of(name: str) -> Path | None:
    """Returns the file of a part that is named FILE.py:NAME; None for a registered name."""
    file, sign, attribute = name.rpartition(":")
    if not (sign and attribute and file.endswith(".py")):
        return None
    return config_folder() / file if name in SHIPPED else Path(file)


@functools.cache
def _module(file: Path) -> Any:
    """Imports a file, once a process."""
    name = f"nemo_rod_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    # dataclasses look their module up
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install_hint() -> str:
    """Returns a sentence to add where the package is on the path without metadata; "" elsewhere."""
    if all_entry_points()[0]:
        return ""
    return " nemo_rod is on the path, but not installed, and so knows few of its parts: install it."


def load_all(kind: str) -> list[Any]:
    """Imports all registered parts of a kind."""
    return [load(kind, name) for name in names(kind)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" with the name nearest to a word; "" if none is near."""
    from difflib import get_close_matches

    names = {str(name).lower(): name for name in known}
    near = get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def beside(kind: str) -> dict[str, EntryPoint]:
    """Returns the parts in the rooms beside the house, by name."""
    return all_entry_points()[0].get(kind, {})


def other_parts(kind: str) -> dict[str, EntryPoint]:
    """Returns the parts of other packages, by name."""
    return all_entry_points()[1].get(kind, {})


@functools.cache
def all_entry_points() -> tuple[dict[str, dict[str, EntryPoint]], dict[str, dict[str, EntryPoint]]]:
    """Returns all entry points by kind and name: nemo_rod's own, and those of other packages.

    A checkout's own are those that its pyproject.toml has now: it may be on the path without being
    installed, or be newer than its installation.
    """
    known = entry_points()
    groups = [group for group in known.groups if re.match("nemo[-_]?rod", group)]
    points = [point for group in groups for point in known.select(group=group)]
    own = [point for point in points if _is_own(point)]
    if (_PACKAGE.parent / "hydra_configs").is_dir():
        text = (_PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
        tables = tomllib.loads(text)["project"]["entry-points"].items()
        own = [EntryPoint(n, v, group) for group, table in tables for n, v in table.items()]
    ours, others = dict[str, dict[str, EntryPoint]](), dict[str, dict[str, EntryPoint]]()
    for table, chosen in (
        (ours, [point for point in own if _is_there(point)]),
        (others, [point for point in points if not _is_own(point)]),
    ):
        for point in sorted(chosen, key=lambda point: (point.name, point.value)):
            kind = point.group.removeprefix("nemo_rod.")
            first = table.setdefault(kind, {}).setdefault(point.name, point)
            if point.value not in first.value.split(" and "):  # `load` refuses them
                both = f"{first.value} and {point.value}"
                table[kind][point.name] = EntryPoint(point.name, both, point.group)
    return ours, others


def unused() -> list[str]:
    """Returns a sentence for every part of other packages that has no effect by where it is."""
    told = []
    for kind, points in all_entry_points()[1].items():
        for name, point in points.items():
            who = f"The package {point.dist.name} registers" if point.dist else "Packages register"
            what = f"{who} '{name}' in {point.group}"
            if kind not in HOUSE:
                told.append(f"{what}, which nothing reads{did_you_mean(kind, HOUSE)}: rename it.")
            elif name in {**HOUSE[kind], **beside(kind)}:
                told.append(f"{what}, but that name stays nemo_rod's own: rename it.")
    return told


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "nemo-rod"


def _is_there(point: EntryPoint) -> bool:
    """Returns whether the room of one of our parts was not left out."""
    package, _, home = point.module.partition(".")
    return package != "nemo_rod" or (_PACKAGE / home.partition(".")[0]).exists()
