"""`nemo-rod reference` without a recipe: reference losses of a job's data, or on NeMo-RL.

With `job=FILE.py:FUNCTION`, FUNCTION has no arguments and returns the configuration of a
Megatron-Bridge job; scripts of other hosts call `nemo_rod.hosts.swap_in.reference` themselves. For
several processes use torchrun, as in `torchrun --no-python nemo-rod reference job=...`; see
docs/swap-in.md. With `--config RECIPE.yaml`, the command runs a recipe in NeMo-RL's own form.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod.commands.arguments import Arguments
from nemo_rod.hosts import swap_in
from nemo_rod.hosts.nemo_rl import cluster, settings

_USAGE = """\
nemo-rod reference job=FILE.py:FUNCTION role=ROLE out=FOLDER roles={PATH: ROLE, ...} [KEY=VALUE ...]
       nemo-rod reference --config RECIPE.yaml rod.role=ROLE [KEY=VALUE ...]
       nemo-rod reference recipe=NAME [arm=ARM] [KEY=VALUE ...]"""
_DESCRIPTION = """\
Computes reference losses: the losses of a fixed model on the blocks of one role.

With job=, on the data of a Megatron-Bridge job of your own; docs/swap-in.md. With --config, on
NeMo-RL, with a recipe in its own form; docs/nemo-rl.md. With neither, as a stage of a recipe, in
Hydra's grammar: `nemo-rod reference recipe=NAME --cfg job` shows all keys of that form."""


@dataclass(kw_only=True)
class ReferenceCommand:
    """Keys of the command line with `job=`."""

    job: str = field(metadata={"help": "FILE.py:FUNCTION that returns the job's configuration"})
    role: str = field(metadata={"help": "adaptation or replay: the samples to score"})
    out: str = field(metadata={"help": "folder of the references"})
    roles: dict[Any, str] = field(metadata={"help": "role of each data path, as for install()"})
    multiplier: int = field(default=swap_in.MULTIPLIER, metadata={"help": "as for install()"})
    checkpoint: str | None = field(
        default=None, metadata={"help": "folder of the reference model's checkpoints"}
    )
    forward_step: str = field(
        default="megatron.bridge.training.gpt_step:forward_step",
        metadata={"help": "FILE.py:NAME or MODULE:NAME of the job's forward step"},
    )


MARKS = {"--config", "job"}  # words of the forms without a recipe


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod reference` without a recipe."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument("--config", metavar="RECIPE.yaml", help="a recipe in NeMo-RL's own form")
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        help="with --config, any key of the recipe in Hydra's grammar; with job=, those below",
    )
    keys = [(f"{key.name}=", _explained(key)) for key in fields(ReferenceCommand)]
    parser.add_table("keys with job=", keys)
    parser.set_defaults(main=main)


def _explained(key: Field[Any]) -> str:
    default = "" if key.default in (MISSING, None) else f"; by default {key.default}"
    return f"{key.metadata['help']}{default}"


def main(options: Namespace) -> None:
    """Computes the losses.

    Raises:
        ValueError: if a key or a value is invalid.
        RuntimeError: if a worker of NeMo-RL failed.
        Stopped: if the run was asked to stop; it resumes when it is started again.
    """
    if options.config is None:
        _of_job(parse(options.words))
    else:
        cluster.run("reference", settings.load(options.config, options.words))


def parse(words: Sequence[str]) -> ReferenceCommand:
    """Reads the `key=value` words of a command with `job=`.

    Raises:
        ValueError: if a key is unknown, missing or invalid.
    """
    known = {field.name for field in fields(ReferenceCommand)}
    try:
        values = _values(words)
        if unknown := set(values) - known:
            raise ValueError(f"expected keys {', '.join(sorted(known))}, found {min(unknown)}")
        return ReferenceCommand(**values)
    except (TypeError, OmegaConfBaseException, ValueError) as error:
        reason = str(error).replace("ReferenceCommand.__init__()", "reference job=...")
        raise ValueError(
            f"The arguments of `nemo-rod reference job=...` do not fit: {reason}."
        ) from None


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Returns the keys and values of `key=value` words, whose values are YAML."""
    merged = OmegaConf.create()
    for word in words:
        try:
            merged.merge_with_dotlist([word])
        except yaml.YAMLError as error:
            key, _, value = word.partition("=")
            raise ValueError(
                f"{word} has a value that is not valid YAML "
                f"({' '.join(str(getattr(error, 'problem', error)).split())}); if it is text, put "
                f"it in quotes inside of quotes, \"{key}='{value}'\""
            ) from None
    values: Any = OmegaConf.to_container(merged)
    return values


def _of_job(command: ReferenceCommand) -> None:
    for key in ("job", "forward_step"):  # a wrong path is refused before Megatron's long import
        file = getattr(command, key).partition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise ValueError(f"{key}={getattr(command, key)}: there is no file {file}.")
    from nemo_rod.cpu import trainers

    trainers.install_megatron_bridge()
    options = asdict(command)
    job, forward_step = map(options.pop, ("job", "forward_step"))
    parts = _named(job, "job")(), _named(forward_step, "forward_step")
    swap_in.reference("megatron_bridge", *parts, **options)


def _named(place: str, key: str) -> Any:
    """Returns the object at FILE.py:NAME or MODULE:NAME."""
    home, _, name = place.partition(":")
    try:
        if not home.endswith(".py"):
            return getattr(importlib.import_module(home), name)
        path = Path(home).resolve()
        sys.path.insert(0, str(path.parent))
        return getattr(importlib.import_module(path.stem), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{key}={place} names nothing ({error}): expected FILE.py:NAME or MODULE:NAME."
        ) from None
