"""Launchers, which run stages here or as Slurm jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rod import parts
from nemo_rod.config import Config

if TYPE_CHECKING:
    from nemo_rod.run.launch.local import Local


def launcher_of(config: Config) -> Local:
    """Returns the launcher that `launcher.kind` names.

    Raises:
        ValueError: there is no launcher of that name.
    """
    launcher: Local = parts.load("launchers", config.launcher.kind, key="launcher.kind")()
    return launcher
