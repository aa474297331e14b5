"""A stage: the replay share over time of every arm that selects."""

from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.config import section
from nemo_rod.files import read_lines
from nemo_rod.run.handover import HandOver, Inputs, Stage
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import trained_arms
from nemo_rod_example.section import Example


def shares_stages(stages: Stages) -> list[Stage]:
    every, results = section(stages.config, Example).shares, stages.results
    arms = tuple(arm.name for arm in trained_arms(stages.config) if arm.scores)

    def inputs() -> Inputs:
        return {"every": every, **{name: results.weights(name) for name in arms}}

    def make(folder: Path) -> dict[str, Any]:
        for name in arms:
            rows = read_lines(results.arm(name) / "metrics.jsonl")
            share_T = np.array([row["rod/replay_share"] for row in rows])
            means = [share_T[step : step + every].mean() for step in range(0, len(rows), every)]
            np.savetxt(folder / f"{name}.txt", means, fmt="%.4f")
        return {}  # outputs for the manifest

    stage = HandOver("shares", results.path / "shares", inputs, make).stage(
        "shares", "replay shares over time", needs=arms, runs_model=False, extra=""
    )
    return [stage] if every and arms else []
