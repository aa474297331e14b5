"""The section `rehearsal` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key, one_of


@dataclass
class Rehearsal:
    """How `nemo-rod rehearse` runs a scaled-down copy of a recipe (docs/rehearsal.md)."""

    run_dir: str | None = None  # folder of the rehearsal; null: run_dir with "_rehearsal"
    steps: int = key(8, ">= 2")  # updates of an arm with train.steps; the others in proportion
    processes: int | None = key(None, ">= 1")  # at most; null: the GPUs here; no limit on CPU
    part: str | None = one_of(None, "materials", "model", "losses")  # its own stages, for launchers
