"""A run that was killed and taken up again is the run that was never killed, bit for bit."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny import LAYOUTS, STEPS

from nemo_rod.config import Parallel
from nemo_rod.selection import Curriculum
from nemo_rod.selection.curriculum.journal import read_rows

# metrics that no two runs share
NEVER = ("timing/", "throughput/", "memory/", "rod/overhead")


def kill_when(ready: Callable[[], bool], job: Path, world_size: int, *, seconds: float = 0) -> None:
    """Starts a job and ends all its processes with SIGKILL, some time after a condition holds."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", f"--nproc-per-node={world_size}"),
        *("-m", "nemo_rod.megatron", str(job)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, "the job ended before it could be killed"
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.001)
    time.sleep(seconds)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family)


def kill_after(step: int, job: Path, world_size: int) -> None:
    """Kills a training job once it has done `step` steps."""
    metrics = job.parent / "metrics.jsonl"
    kill_when(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step, job, world_size
    )


def assert_same_run(one: Path, other: Path, *, steps: int) -> None:
    """The same metrics in every step, and the same files, to the bit."""
    expected, actual = (
        [
            {key: value for key, value in row.items() if not key.startswith(NEVER)}
            for row in read_rows(folder / "metrics.jsonl")
        ]
        for folder in (one, other)
    )
    assert actual == expected and [row["step"] for row in actual] == list(range(steps))
    for name in ("curriculum.rod", "hf/model.safetensors"):
        assert (other / name).read_bytes() == (one / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "scoring"),
    [
        ("single", {}),
        ("dp2", {}),
        ("dp2_distopt", {}),
        ("dp2", {"policy_name": "odm"}),
        ("dp2_distopt", {"policy_name": "mix", "policy_options": {"forgetting": 0.05}}),
        ("dp2", {"kappa": None, "share": 0.35, "balance": "exact"}),  # fixed_like_rod
        ("dp2_distopt", {"kappa": None, "follow_by": "role"}),  # schedule_like_rod
    ],
)
def test_killed_twice_and_resumed_equals_uninterrupted(tiny, layout, scoring):
    parallel = LAYOUTS[layout]
    keys = "".join(f"_{key}" for key in scoring)
    whole, broken = (tiny.root / f"{name}_{layout}{keys}" for name in ("whole", "broken"))
    if "follow_by" in scoring:
        tiny.single()
        scoring = {**scoring, "recorded": str(tiny.root / "single" / "curriculum.rod")}
    options: dict[str, Any] = {"checkpoint__every": 4, "scoring": scoring}
    tiny.rod_run(whole, parallel, **options)
    job = tiny.rod_job(broken, parallel, **options)
    kill_after(6, job, parallel.world_size)
    kill_after(13, job, parallel.world_size)
    tiny.rod_run(broken, parallel, **options)
    assert_same_run(whole, broken, steps=STEPS)


@pytest.fixture(scope="module")
def killed(tiny):
    """The folder of a job that was killed after its sixth step in a layout."""

    @functools.cache
    def run(layout: str, policy: str) -> Path:
        folder = tiny.root / f"killed_{layout}_{policy}"
        options = {"checkpoint__every": 4, "scoring": {"policy_name": policy}}
        job = tiny.rod_job(folder, LAYOUTS[layout], **options)
        kill_after(6, job, LAYOUTS[layout].world_size)
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "policy"),
    [
        ("dp2", "single", "joint"),
        ("dp2", "tp2", "joint"),
        ("single", "dp2", "joint"),
        ("dp2_distopt", "single_distopt", "joint"),
        ("tp2_pp2", "single", "joint"),
        ("tp2_pp2", "pp2_vpp2", "joint"),
        ("dp2", "tp2", "mix"),
        ("tp2_pp2", "single", "mix"),
    ],
)
def test_resumed_in_another_layout_chooses_the_same(tiny, killed, before, after, policy):
    layouts = {**LAYOUTS, "single_distopt": Parallel(distributed_optimizer=True)}
    names = f"whole_single_{policy}", f"moved_{before}_{after}_{policy}"
    whole, moved = (tiny.root / name for name in names)
    options: dict[str, Any] = {"checkpoint__every": 4, "scoring": {"policy_name": policy}}
    if not (whole / "hf").exists():
        tiny.rod_run(whole, layouts["single"], **options)
    shutil.copytree(killed(before, policy), moved)
    tiny.rod_run(moved, layouts[after], **options)
    one, other = (Curriculum.open(run / "curriculum.rod", read_only=True) for run in (whole, moved))
    assert len(one) == len(other) == STEPS
    for a, b in zip(one, other, strict=True):
        assert (a.block_ids[a.chosen] == b.block_ids[b.chosen]).all()
        np.testing.assert_allclose(a.score, b.score, rtol=0, atol=1e-5)
