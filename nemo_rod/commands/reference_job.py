"""`nemo-rod score job=FILE.py:FUNCTION ...`: reference losses of a job's data, without a script.

FUNCTION takes nothing and returns the job's configuration. With several processes torchrun starts
the command, as `torchrun --no-python nemo-rod score job=...`; see docs/swap-in.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod import swap_in


@dataclass(kw_only=True)
class ScoreCommand:
    """Keys of the command line."""

    job: str  # FILE.py:FUNCTION, which gives the job's configuration
    role: str  # adaptation or replay
    out: str  # folder of the references
    roles: dict[Any, str]  # as for install
    multiplier: int = 2  # as for install
    checkpoint: str | None = None  # folder of the reference model's checkpoints
    forward_step: str = "megatron.bridge.training.gpt_step:forward_step"  # MODULE or FILE.py
    host: str = "megatron_bridge"


def is_of_job(arguments: Sequence[str]) -> bool:
    """Whether the command line is of a job, and not of a recipe."""
    return any(argument.startswith("job=") for argument in arguments)


def main(arguments: Sequence[str]) -> None:
    """Scores as the command line says.

    Raises:
        ValueError: a key or a value that cannot be used.
    """
    command = parse(arguments)
    from nemo_rod.megatron.cpu import trainers

    trainers.install_megatron_bridge()
    swap_in.score(
        command.host,
        _named(command.job, "job")(),
        _named(command.forward_step, "forward_step"),
        role=command.role,
        out=command.out,
        roles=command.roles,
        multiplier=command.multiplier,
        checkpoint=command.checkpoint,
    )


def parse(arguments: Sequence[str]) -> ScoreCommand:
    """Reads `key=value` arguments.

    Raises:
        ValueError: an unknown, a missing or an unreadable key.
    """
    known = {field.name for field in fields(ScoreCommand)}
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
        if unknown := set(values) - known:
            raise ValueError(f"expected keys {', '.join(sorted(known))}, found {min(unknown)}")
        return ScoreCommand(**values)
    except (TypeError, OmegaConfBaseException, ValueError) as error:
        reason = str(error).replace("ScoreCommand.__init__()", "score job=...")
        raise ValueError(
            f"The arguments of `nemo-rod score job=...` do not fit: {reason}."
        ) from None


def _named(place: str, key: str) -> Any:
    """What FILE.py:NAME or MODULE:NAME names."""
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
