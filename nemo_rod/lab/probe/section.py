"""The section `probe` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key


@dataclass
class Probe:
    """How `nemo-rod probe` tries a recipe (docs/running.md)."""

    run_dir: str | None = None  # folder of the probe; null: run_dir with "_probe"
    steps: int = key(50, ">= 10")  # updates of either arm
    price: float | None = key(None, ">= 0")  # of an hour of one process, for the cost of the run
