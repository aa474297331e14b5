"""The section `prepare` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.bounds import key


@dataclass
class Prepare:
    """How the text is tokenised."""

    nodes: int = key(1, "in [1, 1000]")  # tasks, on nodes of Slurm or Ray, that share the files
    task: int | None = key(None, ">= 1")  # the only one of them to run; null: all
