"""The section `report` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """Run folders that the report shows beside this run; they are only read."""

    seeds: list[str] = field(default_factory=list)  # runs of the same recipe with other seeds
    settings: list[str] = field(default_factory=list)  # runs of other recipes, shown side by side
