"""How well `nemo-rod plan` predicts what scoring adds to a step, on the toy and this machine.

Several short runs of one recipe: candidates per block, processes and micro-batches differ. Of each,
the plan's scoring time over update time is compared with the medians of `timing/train/*`. Other
work on the machine slows both sides, but not evenly: runs are repeated, and their median counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from _rows import Measurement, Row, Setting, run, under

RECIPE = ("recipe=toy_synthetic", "pretrain.steps=40", "train.steps=60")
CASES = {
    "1 process, m = 2": ("parallel=single", "scoring.micro_batch_size=64"),
    "2 processes, m = 2": ("parallel=dp2",),
    "1 process, m = 4": ("parallel=single", "selection.multiplier=4"),
    "2 processes, m = 2, padded": ("parallel=dp2", "scoring.micro_batch_size=64"),
}
WARM_UP = 5  # steps


def overhead(setting: Setting) -> Iterator[Row]:
    """Predicted and measured scoring time over update time."""
    folder = setting.folder / "run"
    for command in (["prepare"], ["pretrain"], ["train", "arm=no_replay"], ["reference"]):
        nemo_rod(*command, *RECIPE, f"run_dir={folder}")
    for name, case in list(CASES.items())[: 2 if setting.quick else None]:
        options = (*RECIPE, *case, f"run_dir={folder}")
        nemo_rod("plan", *options, "arms=[no_replay,rod]")
        planned = json.loads((folder / "plan.json").read_text())["stages"]
        (stage,) = [row for row in planned if row["name"] == "rod"]
        predicted = stage["scoring_seconds"] / stage["update_seconds"]
        ratios = []
        for _ in range(1 if setting.quick else 3):
            nemo_rod("train", "arm=rod", "rebuild=[rod]", *options)
            ratios.append(measured(folder / "arms" / "rod" / "metrics.jsonl"))
        yield Row(f"scoring / update: {name}", median(ratios), "measured")
        yield Row(f"scoring / update: {name}", predicted, "planned")
        error = abs(predicted / median(ratios) - 1)
        yield under(f"error of the plan: {name}", error, "share", 0.15)


def measured(metrics: Path) -> float:
    """Median scoring time over median update time."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP:]
    scoring, update = (
        median(row[f"timing/train/{part}"] for row in rows) for part in ("scoring", "update")
    )
    return scoring / update


def nemo_rod(*arguments: str) -> None:
    command = [sys.executable, "-m", "nemo_rod.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


MEASUREMENTS: dict[str, Measurement] = {"overhead": overhead}

if __name__ == "__main__":
    run(__doc__, MEASUREMENTS)
