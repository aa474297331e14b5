"""A run that was killed and taken up again is the run that was never killed, bit for bit.

Also one that ends when its loss has converged, and what loggers have of it.
"""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from logged import of_metrics, of_tensorboard, of_wandb
from tiny import LAYOUTS, STEPS, Setting, metric

from nemo_rod.config import Parallel
from nemo_rod.files import read_json
from nemo_rod.selection import Curriculum, SourceRow
from nemo_rod.selection.curriculum.journal import read_rows
from nemo_rod.selection.forgetting import validation_forgetting
from nemo_rod.selection.held_out import Rule, adaptation_loss, over_sources
from nemo_rod.signals import Stopped

# metrics that no two runs share
NEVER = ("timing/", "throughput/", "memory/", "rod/overhead")


def kill_after(step: int, job: Path, world_size: int) -> None:
    """Starts a training job, and kills all its processes once it has done `step` steps."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", f"--nproc-per-node={world_size}"),
        *("-m", "nemo_rod.megatron", str(job)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics, deadline = job.parent / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
        assert process.poll() is None, "the job ended before it could be killed"
        assert time.monotonic() < deadline, "the job did not come so far"
        time.sleep(0.001)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family)


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


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (0, Stopped, "rod was asked to stop and has saved: run it again to resume"),
        (16, RuntimeError, "Megatron ended the process with exit status 16"),  # a rerun differed
    ],
)
def test_only_an_exit_without_a_fault_is_a_stop(status, error, sentence, monkeypatch):
    from nemo_rod.megatron import train_job

    monkeypatch.setattr(train_job, "pretrain", lambda *_, **__: sys.exit(status))
    monkeypatch.setattr(train_job, "_write_checkpoints_in_this_process", lambda: None)
    selector: Any = SimpleNamespace(installed=nullcontext)
    job: Any = SimpleNamespace(name="rod")
    config: Any = None
    with pytest.raises(error, match=sentence):
        train_job._pretrain(job, selector, config, [])


def test_a_logger_that_exits_is_no_stop():
    from nemo_rod.megatron.callbacks.show_metrics import Loggers

    nobody: Any = SimpleNamespace(tensorboard_logger=None, wandb_logger=None)
    shown = Loggers(nobody, nobody, [], "rod")
    shown.others = [SimpleNamespace(log=lambda metrics, step: sys.exit(0))]  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"step 4: .*<lambda> ends the process \(0\)"):
        shown._show(nobody, 4, {"train/loss": 1.0})


LOGGED = 12  # steps
TIMES = ("rod/seconds_", "rod/overhead", "host/model", "host/peak", "at_a_glance/tokens")


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_one_curve_in_every_logger(tiny, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # no account: files
    from torch.utils.tensorboard import SummaryWriter

    out, run_dir = tiny.root / "logged", str(tmp_path / "run")
    (tmp_path / "run" / "tensorboard" / "rod").mkdir(parents=True)
    with SummaryWriter(tmp_path / "run" / "tensorboard" / "rod") as writer:
        writer.add_scalar("at_a_glance/forgetting", 9.0, 0)  # of an arm that is made again
    loggers = ["tensorboard", "wandb"]
    options = {"checkpoint__every": 5, "validation__every": 3, "logger": loggers}
    job = tiny.rod_job(out, Parallel(), steps=LOGGED, run_dir=run_dir, **options)
    kill_after(8, job, 1)
    lost = (out / "metrics.jsonl").read_text().splitlines()[5:]
    assert lost  # steps after the checkpoint, which are done twice
    outputs = tiny.torchrun(1, "nemo_rod.megatron", job)
    assert sum("W&B has no account here" in line for line in outputs) <= 1
    rows = read_rows(out / "metrics.jsonl")
    start = read_json(out / "validation_start.json")
    counts = {s.name: s.count for s in tiny.store.sources if s.role == "replay"}
    for row in rows[2::3]:
        now, before = (
            {name: losses[f"validation/replay/{name}/loss"] for name in counts}
            for losses in (row, start)
        )
        assert row["validation/forgetting"] == validation_forgetting(now, before, counts) > 0
    expected = of_metrics(out)
    assert list(expected["at_a_glance/training_loss"]) == list(range(1, LOGGED + 1))
    assert list(expected["at_a_glance/forgetting"]) == [3, 6, 9, 12]
    assert 0 in expected["rod_by_source/replay/chain_0/loss"]
    board = of_tensorboard(tmp_path / "run" / "tensorboard" / "rod")
    online, ids = of_wandb(out)
    assert ids == {json.loads((out / "loggers.json").read_text())["wandb"]}
    assert set(board) == set(expected), "the trainer's own curves would repeat ours"
    assert {name for name in online if name[0] != "_"} == set(expected)
    for name, curve in expected.items():
        # TensorBoard stores float32
        assert board[name] == pytest.approx(curve, rel=1e-6, abs=1e-12), name
        if not name.startswith(TIMES):  # W&B has the times of the first attempt
            assert online[name] == curve, name
        assert online[name].keys() == curve.keys()


def slow_converged_at(losses, tolerance, patience):
    """The same rule, from its words: the last `patience` losses beat no best before them."""
    for last in range(patience, len(losses)):
        best, waiting = math.inf, []
        for done, loss in losses[: last + 1]:
            better = loss < best - tolerance
            waiting = [] if better else [*waiting, done]
            best = loss if better else best
        if len(waiting) >= patience:
            return waiting[-1]
    return None


def test_the_rule_is_what_it_says():
    for seed, tolerance, patience in product(range(40), (0.0, 0.02, 0.5), (1, 2, 4)):
        noise = 0.1 * np.random.default_rng(seed).random(30)
        values = 2 * np.exp(-np.arange(30) / 6) + noise
        losses = [(5 * (i + 1), float(value)) for i, value in enumerate(values)]
        actual = Rule(tolerance, patience, 1).converged_at(losses)
        assert actual == slow_converged_at(losses, tolerance, patience)


def test_the_loss_is_that_of_new_sources_by_their_size():
    look = {
        "validation/adaptation/a/loss": 2.0,
        "validation/adaptation/b/loss": 3.0,
        "validation/replay/c/loss": 9.0,
    }
    sources = [SourceRow(*row) for row in (("a", "adaptation", 0, 3), ("b", "adaptation", 3, 1))]
    sources += [SourceRow("c", "replay", 4, 9), SourceRow("unmeasured", "adaptation", 13, 9)]
    assert adaptation_loss(look, sources) == 2.25
    assert adaptation_loss({"train/loss": 1.0}, sources) is None
    assert over_sources(look, {**look, "validation/replay/c/loss": 8.5}, sources) == {
        "validation/adaptation_loss": 2.25,
        "validation/forgetting": 0.5,
    }
    diverged = dict.fromkeys(look, math.nan)
    assert over_sources(diverged, look, sources) == over_sources({}, look, sources) == {}
    assert over_sources(look, {}, sources).keys() == {"validation/adaptation_loss"}


def converging(tiny: Setting, name: str) -> Path:
    """Writes the job of a run that converges after 6 of at most 20 steps, and decays for 4."""
    return tiny._job(
        *("no_replay", tiny.root / name, LAYOUTS["dp2"]), model=tiny.base, steps=20, lr=3e-3,
        references=[], checkpoint__every=2, validation__every=2, train__decay_fraction=4 / 20,
        convergence=Rule(tolerance=100.0, patience=2, decay_steps=4),
    )  # fmt: skip


@pytest.mark.slow
def test_killed_before_and_after_converging_equals_uninterrupted(tiny):
    whole, broken = converging(tiny, "whole_converging"), converging(tiny, "broken_converging")
    tiny.torchrun(2, "nemo_rod.megatron", whole)
    kill_after(4, broken, 2)
    kill_after(8, broken, 2)
    tiny.torchrun(2, "nemo_rod.megatron", broken)
    assert_same_run(whole.parent, broken.parent, steps=10)
    lr = metric(whole.parent, "train/lr")
    decay = [3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert lr[2:7] == pytest.approx([3e-3] * 5)
    assert lr[6:] == pytest.approx(decay)
