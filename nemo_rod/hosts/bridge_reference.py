"""Megatron-Bridge's half of `nemo-rod reference`: the references of a job, by `key=value` words.

`job=FILE.py:FUNCTION` names a function without arguments that returns the job's configuration. For
several processes use torchrun, as in `torchrun --no-python nemo-rod reference job=...`.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from nemo_rod.commands.arguments import Key
from nemo_rod.hosts import swap_in
from nemo_rod.roles import ROLES

_FORWARD_STEP = "megatron.bridge.training.gpt_step:forward_step"


def _mapping(text: str) -> dict[Any, str]:
    try:
        return dict(yaml.safe_load(text))
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(text) from error


KEYS = (
    Key("job", "FILE.py:FUNCTION", "function that returns the job's configuration"),
    Key("role", "ROLE", "the samples to score: adaptation or replay", choices=ROLES),
    Key("out", "FOLDER", "folder of the references"),
    Key("roles", "ROLES", "role of each data path, as for install(): {PATH: ROLE, ...}",
        "{PATH: ROLE, ...}", read=_mapping),
    Key("multiplier", "M", f"as for install(); by default {swap_in.MULTIPLIER}",
        "a number of at least 1", read=float),
    Key("checkpoint", "FOLDER", "folder of the reference model's checkpoints"),
    Key("forward_step", "PLACE",
        f"FILE.py:NAME or MODULE:NAME of the job's forward step; by default {_FORWARD_STEP}"),
)  # fmt: skip


def run(options: Namespace) -> None:
    """Computes the losses, by the values of `KEYS`.

    Raises:
        ValueError: a key is missing or names nothing, or selection refuses the job.
    """
    given = {key.name: value for key in KEYS if (value := getattr(options, key.name)) is not None}
    missing = [f"{name}=" for name in ("job", "role", "out", "roles") if name not in given]
    if missing or options.words:
        wrong = f"misses {', '.join(missing)}" if missing else f"has no key {options.words[0]}"
        names = ", ".join(f"{key.name}=" for key in KEYS)
        raise ValueError(f"`nemo-rod reference job=...` {wrong}: expected {names}.")
    places = {"job": given.pop("job"), "forward_step": given.pop("forward_step", _FORWARD_STEP)}
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
    swap_in.reference("megatron_bridge", make_config(), forward_step, **given)
