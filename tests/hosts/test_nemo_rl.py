"""RoD on NeMo-RL: real Ray, and the Policy, batches, configuration, checkpoints and logger of a
NeMo-RL checkout (`make test-nemo-rl NEMO_RL=<checkout>`), over a gloo worker with a real
Megatron-core model that inherits our extension.
"""

import json
import os
import signal
import subprocess
import sys
import time

import nemo_rl_runs as rl
import pytest
import yaml
from places import ROOT, WORKERS
from tiny import STEPS, configured

from nemo_rod.config import Parallel
from nemo_rod.jobs import ReferenceJob
from nemo_rod.selection import References
from nemo_rod.signals import Stopped

pytestmark = pytest.mark.nemo_rl
STOCK = WORKERS / "nemo_rl_cpu" / "stock.py"


@pytest.fixture(scope="module")
def runs(tiny, environment):
    runs = rl.Runs(tiny, environment)
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def trained(runs):
    return runs.train("nemo_rl", logger=["tensorboard"])


def test_the_project_for_its_research_folder_passes_its_own_tests(tmp_path):
    """Those of `make nemo-rl-project`, started as the checkout's own tests of projects are."""
    project = tmp_path / "replay_on_demand"
    make = ROOT / "docs" / "examples" / "nemo_rl_research" / "make.sh"
    subprocess.run(["bash", make, rl.CHECKOUT, "https://example.org/rod", project], check=True)
    assert "https://example.org/rod" in (project / "pyproject.toml").read_text()
    paths = os.pathsep.join([rl.CHECKOUT, str(ROOT)])
    pytest_run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit"]
    subprocess.run(pytest_run, cwd=project, env={**os.environ, "PYTHONPATH": paths}, check=True)
    subprocess.run(["bash", "-n", project / "tests" / "functional" / "rod.sh"], check=True)


def test_same_blocks_and_metrics_as_megatron_bridge(tiny, trained):
    rl.assert_same_choices_as_bridge(tiny, trained)
    for ours, theirs in zip(rl.rows(trained), rl.rows(tiny.root / "single"), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_same_blocks_in_other_layouts(runs, trained, layout):
    parallel = Parallel(**{layout: 2}, distributed_optimizer=False)
    out = runs.train(f"nemo_rl_{layout}", parallel=parallel)
    assert rl.chosen_ids(out) == rl.chosen_ids(trained)


def test_a_watched_job_is_the_stock_job(runs):
    """One that chooses nothing, and NeMo-RL's own `Policy.train` on the same blocks."""
    own = {"arm": "fixed_50", "parallel": Parallel(distributed_optimizer=False)}
    watched = rl.rows(runs.train("nemo_rl_watched", **own))
    job, stock = runs.job(runs.tiny.root / "nemo_rl_stock", **own), str(STOCK)
    output = runs.run(*job, program=[*rl.RUN_JOB[:-1], stock])
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"loss')]
    for key in ("loss", "grad_norm"):
        assert [row[f"train/{key}"] for row in watched] == [step[key] for step in steps]
    assert len(watched) == STEPS and "validation/forgetting" in watched[-1]


def test_logger_gets_the_metrics(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # its hyper-parameters lie in a folder of their own
    folders = {path.parent for path in trained.rglob("events.out.tfevents*")}
    logs = [EventAccumulator(str(folder)).Reload() for folder in folders]
    loss = "at_a_glance/training_loss"
    (events,) = [log for log in logs if loss in log.Tags()["scalars"]]
    logged = [event.value for event in events.Scalars(loss)]
    assert logged == pytest.approx([row["train/loss"] for row in rl.rows(trained)])
    ours = ("rod_by_source/replay/chain_0/loss", "rod/seconds_total", "at_a_glance/forgetting")
    assert {*ours} <= {*events.Tags()["scalars"]}


def test_killed_and_resumed_equals_uninterrupted(runs, trained):
    out = runs.tiny.root / "nemo_rl_killed"
    job = runs.job(out)
    rl.kill_after(runs.start(*job), out, 11)
    assert (out / "checkpoints" / "step_8").is_dir()
    runs.run(*job)
    assert [row["step"] for row in rl.rows(out)] == list(range(STEPS))
    assert rl.rows(out) == rl.rows(trained)
    whole, resumed = (folder / "curriculum.rod" for folder in (trained, out))
    assert whole.read_bytes() == resumed.read_bytes()


def test_asked_to_stop_saves(runs):
    out = runs.tiny.root / "nemo_rl_stopped"
    process = runs.start(*runs.job(out, steps=2000))
    rl.wait_for_steps(process, out, 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == Stopped.exit_status
    done = len(rl.rows(out))
    assert f"stopped after step {done}: run it again" in output
    assert (out / "checkpoints" / f"step_{done}").is_dir()


def test_asked_to_stop_when_its_workers_have_ended_resumes(runs):
    """A worker freezes in step 10; the run is asked to stop and cannot complete the step."""
    out = runs.tiny.root / "nemo_rl_ended_first"
    process = runs.start(*runs.job(out, launcher__stall_seconds=25), fault="stop:1:10")
    rl.wait_for_steps(process, out, 9)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == Stopped.exit_status, output[-5000:]
    assert "rod was asked to stop, and ended in step 10 before it had saved (rod_step: no" in output
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == ["step_8"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise:1:3", "nemo-rod: rank 1: this worker was told to refuse"),
        ("kill:1:3", "nemo-rod: rank 1: its process died"),
        ("stop:1:3", "nemo-rod: rod_step: no answer of rank"),
    ],
)
def test_failed_worker_ends_the_driver_with_the_cause(runs, tmp_path, fault, cause):
    process = runs.start(*runs.job(tmp_path, launcher__stall_seconds=25), fault=fault)
    rl.wait_for_steps(process, tmp_path, 2)
    started = time.monotonic()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert cause in output, output[-5000:]
    assert time.monotonic() - started < 60


def test_refusals_before_training_are_one_sentence(runs, tmp_path):
    for policy, sentence in (
        ({"sequence_packing": {"enabled": True}}, "sequence_packing.enabled is True: expected"),
        ({"precision": "bfloat16"}, "precision"),
    ):
        process = runs.start(*runs.job(tmp_path, {**rl.CPU, "policy": policy}))
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 2, output[-3000:]
        last = [line for line in output.splitlines() if line.startswith("nemo-rod: ")]
        assert last and sentence in last[-1], output[-3000:]


def test_reference_losses_equal_megatron_bridges(runs, tiny):
    out = tiny.root / "nemo_rl_reference"
    config = configured(parallel=rl.DP2, scoring__micro_batch_size=4)
    job = tiny.write(
        ReferenceJob, "base", out, config, start=str(tiny.base), role="replay",
        model_digest="base", lengths=[64],
    )  # fmt: skip
    runs.run(job, json.dumps(rl.CPU))
    store = tiny.store
    ids = list(range(store.num_adaptation, len(store)))
    ours, theirs = (
        References.open([tiny.references[0], replay], store)[ids]
        for replay in (out, tiny.references[1])
    )
    assert abs(ours - theirs).max() < 1e-6


def test_a_step_of_2048_candidates_moves_under_100_kb(runs, tmp_path):
    program = [sys.executable, "-W", "ignore", WORKERS / "nemo_rl_cpu" / "traffic.py"]
    output = subprocess.run(
        [*program, *runs.job(tmp_path, batch_size=1024, scoring__micro_batch_size=64)],
        env=runs.environment, capture_output=True, text=True, timeout=1000,
    ).stdout  # fmt: skip
    moved = json.loads(next(line for line in output.splitlines() if line.startswith('{"cand')))
    assert moved["candidates"] == 2048
    print(f"one step of 2048 candidates: {moved}")
    assert moved["received"] > 8192  # the scores at least: the meter saw them
    assert moved["sent"] + moved["received"] < 100_000


@pytest.mark.timeout(1500)
def test_a_recipe_runs_whole_on_nemo_rl(runs, tmp_path, monkeypatch):
    """From text to report, its arms in one process, each with runs of its own in the loggers."""
    tiny = runs.tiny
    settings = {
        "arms": ["no_replay", "rod"],
        "model": {"hf": str(tiny.base), "precision": "fp32"},
        "domain": {
            "tokenizer": "byte",
            "block_size": 64,
            "holdout_fraction": 0.1,
            "sources": {
                "dialect": {"role": "adaptation", "kind": "synthetic", "files": ["dialect:0:0.25"],
                            "max_bytes": 20_000},
                "chain": {"role": "replay", "kind": "synthetic", "files": ["markov:0"],
                          "max_bytes": 20_000},
            },
        },
        "parallel": {"data": 2, "distributed_optimizer": False},
        "train": {"steps": 6, "batch_size": 8, "micro_batch_size": 2, "lr": 1e-3},
        "scoring": {"micro_batch_size": 4},
        "launcher": {"kind": "nemo_rl"},
        "nemo_rl": {
            **rl.CPU,
            "policy": {"megatron_cfg": {"optimizer": {"use_precision_aware_optimizer": False}}},
        },
    }  # fmt: skip
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\n" + yaml.safe_dump(settings)
    (tmp_path / "recipe" / "tiny_nemo_rl.yaml").write_text(text)
    monkeypatch.setitem(runs.environment, "WANDB_MODE", "offline")
    options = ["--config-dir", tmp_path, "recipe=tiny_nemo_rl", f"run_dir={tmp_path / 'run'}"]
    runs.run("run", *options, "logger=[tensorboard,wandb]", program=rl.CLI)
    arms = tmp_path / "run" / "arms"
    assert (tmp_path / "run" / "report" / "index.html").exists()
    assert len(rl.records(arms / "rod")) == 6
    logged = []
    for name in ("no_replay", "rod"):
        arm = arms / name
        assert (arm / "hf" / "model.safetensors").exists()
        assert (arm / "evaluation.json").exists()
        run = json.loads((arm / "loggers.json").read_text())["wandb"]
        (folder,) = arm.rglob("offline-run-*")
        assert folder.name.endswith(f"-{run}")
        assert (folder / f"run-{run}.wandb").stat().st_size > 0
        logged.append(run)
    assert len(set(logged)) == 2
