"""The sections `rehearsal` and `probe` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key, one_of


@dataclass
class Rehearsal:
    """How `nemo-rod rehearse` runs a recipe in small (docs/rehearsal.md)."""

    run_dir: str | None = None  # folder of the rehearsal; null: run_dir with "_rehearsal"
    steps: int = key(8, ">= 2")  # updates of an arm with train.steps; the others in proportion
    model: str = one_of("small", "own")  # a small one of the same type, or the recipe's own
    processes: int | None = key(None, ">= 1")  # the most; null: the GPUs here; no limit on CPU


@dataclass
class Probe:
    """How `nemo-rod probe` tries a recipe (docs/running.md)."""

    run_dir: str | None = None  # folder of the probe; null: run_dir with "_probe"
    steps: int = key(50, ">= 10")  # updates of each arm
    price: float | None = key(None, ">= 0")  # an hour of one process; adds the cost of the run
