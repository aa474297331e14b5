"""The section `report` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nemo_rod.bounds import key
from nemo_rod.config import Config, section
from nemo_rod.run.variants import arm_settings

LIKE_ROD = ("fixed_like_rod", "schedule_like_rod")  # controls that are arms of every such recipe


@dataclass
class Report:
    """The judgement of a run in its report, and other run folders to show, which are only read."""

    seeds: list[str] = field(default_factory=list)  # runs of the same recipe with other seeds
    smoke_test: bool = False  # whether the recipe is too small to judge the method's claims by
    # fixed shares tried at most until two near ones enclose RoD's forgetting; 0: neither these nor
    # fixed_like_rod and schedule_like_rod
    max_controls: int = key(3, ">= 0")
    gpu_hour_price: float | None = key(None, ">= 0")  # any currency; adds money to the page's costs
    # continued on the page by base, no_replay, fixed and rod; null is the first tokens of held-out
    # blocks, for models below 200 MB; [] is none
    prompts: list[str] | None = None
    settings: list[str] = field(default_factory=list)  # runs of other recipes, shown side by side

    def complete(self, config: Config) -> None:
        """Adds the controls that are like RoD, but those of which the recipe has the same."""
        known = [arm_settings(config, name) for name in config.arms] if has_controls(config) else []
        alike = [replace(arm.planned_arm, name="") for arm in known if arm.kind == "trained"]
        for name in filter(config.variants.__contains__, LIKE_ROD if known else ()):
            if replace(arm_settings(config, name).planned_arm, name="") not in alike:
                config.arms = [*config.arms, name]


def has_controls(config: Config) -> bool:
    """Returns whether a recipe has controls: RoD is trained there, and is to be judged."""
    report = section(config, Report)
    return bool(report.max_controls) and not report.smoke_test and "rod" in config.arms
