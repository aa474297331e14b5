"""What a step of RoD costs beside a plain one, and where the difference goes.

One job trains. Its steps take turns: plain, RoD with whole candidates, with half and with a quarter
of them, and a plain one whose forward pass is measured by itself. So whatever else the machine does
meets all kinds, and every ratio is of neighbours, the median over the rounds. The model and the
batch are those of `recipe=toy`.

    limit            1 + m * forward / plain: scoring as fast as the forward pass of training
    outside_model    all that is neither the scoring forward pass nor the update: the pool, the
                     references, reading, gathering the losses, top-k, the records
    scoring_over_forward    candidates a second when scored, over blocks a second in training's
                     forward pass

Times on a CPU are the processor's, of the slowest rank, so that what else runs on the machine does
not count; the ratio of wall times stands beside them. On a GPU all are wall times. Where ranks wait
for each other in gathering the losses, the rank that waits least is counted.

    python benchmarks/step.py --json rows.json [--quick] [--only single ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _rows import Measurement, Row, Setting, over, run, under

RECIPE = (
    "recipe=toy_synthetic",  # its text is made up, and the rest is brought to the size of the toy
    "domain.block_size=128",
    "pretrain.steps=4",
    "train.steps=4",
    "scoring.micro_batch_size=32",
)
LAYOUTS = {"single": 1, "dp2": 2, "tp2": 2}
GOALS = {"rod_over_limit": 1.03, "prefix_half": 1.37, "prefix_quarter": 1.20, "outside_model": 0.02}


def layout(name: str, setting: Setting) -> Iterator[Row]:
    """One layout on this machine."""
    job = make_job(setting.folder, name)
    rounds = 10 if setting.quick else 40
    seconds = measure(job, processes=LAYOUTS[name], rounds=rounds)
    rod, plain, forward = seconds["rod"], seconds["plain"], seconds["forward"]
    multiplier = seconds["num_candidates"] / seconds["num_chosen"]
    ratio, limit = np.median(rod / plain), 1 + multiplier * np.median(forward / plain)
    yield Row(f"rod_over_plain {name}", ratio, "x")
    wall = np.median(seconds["rod on the wall"] / seconds["plain on the wall"])
    yield Row(f"rod_over_plain.wall {name}", wall, "x")
    yield Row(f"limit {name}", limit, "x")
    yield under(f"rod_over_limit {name}", ratio / limit, "x", GOALS["rod_over_limit"])
    outside = np.median(seconds["outside"] / rod)
    yield under(f"outside_model {name}", outside, "share", GOALS["outside_model"])
    for kind in ("half", "quarter"):
        value = np.median(seconds[f"prefix_{kind}"] / plain)
        yield under(f"prefix_{kind}_over_plain {name}", value, "x", GOALS[f"prefix_{kind}"])
    speed = multiplier * np.median(forward / seconds["scoring"])
    yield over(f"scoring_over_forward {name}", speed, "x", 1.0)
    for part in ("plain", "forward", "scoring", "lookup", "selection", "reading", "recording"):
        yield Row(f"ms {part} {name}", 1e3 * np.median(seconds[part]), "ms")


def make_job(folder: Path, parallel: str) -> Path:
    """A store, a base, references and the job of a RoD run, by the real stages."""
    common = (*RECIPE, f"run_dir={folder}", "parallel=single")
    for command in (("prepare",), ("pretrain",), ("train", "arm=no_replay"), ("score",)):
        nemo_rod(*command, *common)
    # trains its few steps, too: the job's file is what is wanted
    nemo_rod("train", "arm=rod", *common[:-1], f"parallel={parallel}")
    return folder / "arms" / "rod" / "job.json"


def nemo_rod(*arguments: str) -> None:
    command = [sys.executable, "-m", "nemo_rod.cli", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def measure(job: Path, *, processes: int, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every round, float64 `[rounds]`, by kind of step and by part of a RoD step."""
    out = job.parent / "seconds.json"
    launch = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    worker = Path(__file__).with_name("_step_worker.py")
    command = [sys.executable, *launch, f"--nproc-per-node={processes}", str(worker)]
    subprocess.run(
        [*command, str(job), str(rounds), str(out)], check=True, capture_output=True, text=True
    )
    return {name: np.array(value) for name, value in json.loads(out.read_text()).items()}


MEASUREMENTS: dict[str, Measurement] = {name: partial(layout, name) for name in LAYOUTS}

if __name__ == "__main__":
    run(__doc__, MEASUREMENTS)
