"""The section `report` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rod.bounds import key

if TYPE_CHECKING:
    from nemo_rod.config import Config


@dataclass
class Report:
    """The judgement of a run in its report, and other run folders to show, which are only read."""

    seeds: list[str] = field(default_factory=list)  # runs of the same recipe with other seeds
    smoke_test: bool = False  # whether the recipe is too small to judge the method's claims by
    # fixed shares tried at most until two near ones enclose RoD's forgetting; 0: neither these nor
    # fixed_like_rod and schedule_like_rod
    max_controls: int = key(3, ">= 0")
    gpu_hour_price: float | None = key(None, ">= 0")  # in any currency, for the page's costs
    # continued on the page by base, no_replay, fixed and rod; null is the first tokens of held-out
    # blocks, for models below 200 MB; [] is none
    prompts: list[str] | None = None
    settings: list[str] = field(default_factory=list)  # runs of other recipes, shown side by side

    def complete(self, config: Config) -> None:
        """Finds out what the names of arms mean, and adds controls, before they are checked."""
        from nemo_rod.lab.controls import add_controls, name_arms

        name_arms(config)
        add_controls(config)
