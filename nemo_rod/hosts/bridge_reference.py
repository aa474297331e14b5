"""Megatron-Bridge's half of `nemo-rod reference`: the references of a job, in `key=value` words.

`job=FILE.py:FUNCTION` names a function without arguments that returns the job's configuration. For
several processes use torchrun, as in `torchrun --no-python nemo-rod reference job=...`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod.hosts import swap_in


@dataclass(kw_only=True)
class ReferenceKeys:
    """Keys of the command line."""

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


def key_table() -> list[tuple[str, str]]:
    """Returns the keys and their meaning, for the help."""
    defaults = {
        key.name: f"; by default {key.default}" if key.default not in (MISSING, None) else ""
        for key in fields(ReferenceKeys)
    }
    return [(f"{k.name}=", k.metadata["help"] + defaults[k.name]) for k in fields(ReferenceKeys)]


def parse(words: Sequence[str]) -> ReferenceKeys:
    """Reads `key=value` words, whose values are YAML.

    Raises:
        ValueError: if a key is unknown, missing or invalid.
    """
    known = {key.name for key in fields(ReferenceKeys)}
    merged = OmegaConf.create()
    try:
        for word in words:
            try:
                merged.merge_with_dotlist([word])
            except yaml.YAMLError as error:
                key, _, value = word.partition("=")
                raise ValueError(
                    f"{word} has a value that is not valid YAML "
                    f"({' '.join(str(getattr(error, 'problem', error)).split())}); if it is text, "
                    f"put it in quotes inside of quotes, \"{key}='{value}'\""
                ) from None
        values: Any = OmegaConf.to_container(merged)
        if unknown := set(values) - known:
            raise ValueError(f"expected keys {', '.join(sorted(known))}, found {min(unknown)}")
        return ReferenceKeys(**values)
    except (TypeError, OmegaConfBaseException, ValueError) as error:
        reason = str(error).replace("ReferenceKeys.__init__()", "reference job=...")
        raise ValueError(
            f"The arguments of `nemo-rod reference job=...` do not fit: {reason}."
        ) from None


def run(words: Sequence[str]) -> None:
    """Computes the losses.

    Raises:
        ValueError: if a key or a value is invalid, or selection refuses the job.
    """
    options = asdict(parse(words))
    places = {key: options.pop(key) for key in ("job", "forward_step")}
    for key, place in places.items():  # a wrong path is refused before Megatron's long import
        file = place.partition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise ValueError(f"{key}={place}: there is no file {file}.")
    from nemo_rod import cpu

    cpu.prepare()  # before the first import of Megatron-Bridge
    from nemo_rod.cpu import trainers

    trainers.install_megatron_bridge()
    objects = []
    for key, place in places.items():
        module, _, name = place.partition(":")
        try:
            if module.endswith(".py"):
                path = Path(module).resolve()
                sys.path.insert(0, str(path.parent))
                module = path.stem
            objects.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{key}={place} cannot be imported ({error}): expected FILE.py:NAME or MODULE:NAME."
            ) from None
    make_config, forward_step = objects
    swap_in.reference("megatron_bridge", make_config(), forward_step, **options)
