"""Controls: fixed replay that is trained beside RoD, to judge RoD by.

    fixed_like_rod       RoD's mean share in every batch, blocks at random
    schedule_like_rod    RoD's share step by step, blocks at random
    fixed_<percent>      shares found by bisection, until two near ones enclose RoD's forgetting
    fixed_<percent>_total  where a recipe names it: for as long as RoD costs in all

The first two are arms that every recipe with RoD has. The shares of the last follow from held-out
losses, so that one stage decides and trains them, one after the other, once all arms are evaluated.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from nemo_rod import parts
from nemo_rod.commands.text import say
from nemo_rod.config import Config, section
from nemo_rod.files import read_json, write_json
from nemo_rod.lab.report.section import Report, has_controls
from nemo_rod.roles import ROLES
from nemo_rod.run.handover import HandOver, Inputs, Stage, partial
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, arm_settings
from nemo_rod.selection.arm_names import parse_arm
from nemo_rod.selection.competition import FORWARD
from nemo_rod.selection.policies import reference_roles

FOLDER, DECIDED = "controls", "decided.json"
WHY = (
    "RoD is judged by fixed_like_rod (its mean share), schedule_like_rod (its share by step), and "
    "up to {most} fixed shares until two near ones enclose its forgetting, a plain run each; "
    "report.max_controls=0 leaves all out"
)


def as_long_as_rod(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant fixed_<percent>_total, as much compute as RoD costs in all, or None.

    That is with its specialist and its references, in plain runs. Every block that it draws is
    taken for a new one, whose reference is read once.
    """
    if (match := re.fullmatch(r"(fixed_[\d.]+)_total", name)) is None:
        return None
    rod, specialist = (arm_settings(config, name) for name in ("rod", SPECIALIST))
    roles = len(reference_roles(rod.planned_arm.needs))
    drawn = rod.planned_arm.num_candidates / rod.train.batch_size
    runs = rod.planned_arm.compute(1) + FORWARD * drawn * roles / len(ROLES)
    steps = rod.train.steps * runs + (specialist.train.steps if roles == len(ROLES) else 0)
    return {"of": match[1], "compute": steps / config.train.steps}


def control_stages(stages: Stages) -> list[Stage]:
    """Returns the stage that trains fixed shares near RoD, after those already decided on."""
    config, results = stages.config, stages.results
    if not has_controls(config):
        return []
    most, folder = section(config, Report).max_controls, results.path / FOLDER

    def inputs() -> Inputs:
        weights = {name: results.weights(name) for name in ("base", "rod")}
        return {**weights, "report.max_controls": most}

    def make(unfinished: Path) -> dict[str, Any]:
        from nemo_rod.lab.report.results import results_of
        from nemo_rod.lab.report.run_files import read_run
        from nemo_rod.lab.report.verdict import search

        names = _decided_arms(unfinished)
        for name in names:  # left by an interrupted attempt
            _train(stages, name)
        while True:
            found = search(results_of(read_run(results.path))["arms"])
            name, why = f"fixed_{found.share}", found.why
            if found.share is not None and len(names) == most:
                why += f"; {most} shares were tried"
            elif found.share is not None:
                try:
                    stages.jobs.arm(name)
                except ValueError as error:  # the corpus has too little replay
                    why += f"; {error}"
                else:
                    say(f"    {why}: {name} is next")
                    names.append(name)
                    write_json(unfinished / DECIDED, {"arms": names})
                    _train(stages, name)
                    continue
            say(f"    {why}")
            return {"arms": names, "why": why}

    hand_over = HandOver(FOLDER, folder, inputs, make)
    stage = hand_over.stage(FOLDER, "train fixed shares near RoD's forgetting", needs=("evaluate",))
    earlier = _decided_arms(folder) + _decided_arms(partial(folder))
    trained = [stages.train(name) for name in earlier if name not in config.arms]
    return [*trained, dataclasses.replace(stage, preview=lambda: WHY.format(most=most))]


def _decided_arms(folder: Path) -> list[str]:
    """Returns the names of the arms that were decided on, trained or not."""
    file = folder / DECIDED
    names = read_json(file, "arms")["arms"] if file.is_file() else []
    return [str(name) for name in names if parse_arm(str(name)).kind == "fixed"]


def _train(stages: Stages, name: str) -> None:
    """Trains and measures an arm of fixed replay, or what is left of that."""
    stage = stages.train(name)
    if not stage.is_done():
        stage.run()
    for measurement in parts.load_all("measurements"):
        if measurement.wanted(stages.config):
            measurement.measure(stages.jobs, ["base", name])
