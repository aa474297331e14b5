"""RoD on NeMo-RL: real Ray, and the Policy, batches, configuration, checkpoints and logger of a
NeMo-RL checkout (`make test-nemo-rl NEMO_RL=<checkout>`), over a gloo worker with a real
Megatron-core model that inherits our extension.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from places import ROOT, WORKERS
from tiny import BATCH, STEPS, Setting

from nemo_rod.config import Parallel
from nemo_rod.selection import Curriculum, References

pytestmark = pytest.mark.nemo_rl

CHECKOUT = os.environ.get("NEMO_RL", "")
CLI = [sys.executable, "-W", "ignore", "-m", "nemo_rod.cli"]


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """A Ray cluster of one node and four logical CPUs; what a process needs to join it."""
    assert (Path(CHECKOUT) / "nemo_rl").is_dir(), f"NEMO_RL={CHECKOUT!r} is no checkout of NeMo-RL"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = [CHECKOUT, str(ROOT), str(WORKERS / "nemo_rl_cpu")]
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_register_timeout_seconds": "900",  # on a loaded machine a worker starts slowly
        "TORCH_CUDA_ARCH_LIST": "9.0",  # NeMo-RL asks for it, whatever it is
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    temp = tempfile.mkdtemp(prefix="rod")  # Ray's sockets lie below, and their paths must be short
    ray = str(Path(sys.executable).parent / "ray")
    command = [
        *(ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--num-gpus=0"),
        *("--include-dashboard=false", "--object-store-memory=150000000", f"--temp-dir={temp}"),
    ]
    head = subprocess.Popen(command, env=shared, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        status = [ray, "status", f"--address=127.0.0.1:{port}"]
        while subprocess.run(status, env=shared, capture_output=True).returncode != 0:
            assert time.monotonic() < deadline, "Ray did not start"
            if head.poll() is not None:  # it gives up after 30 s, too soon on a loaded machine
                head = subprocess.Popen(command, env=shared, stdout=subprocess.DEVNULL)
            time.sleep(1)
        yield {**shared, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for member in [*psutil.Process(head.pid).children(recursive=True), head]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        head.wait()
        shutil.rmtree(temp, ignore_errors=True)


class Runs:
    """Writes recipes and runs them by the command line."""

    def __init__(self, tiny: Setting, environment: dict[str, str]) -> None:
        self.tiny, self.environment = tiny, environment

    def recipe(self, out: Path, model: Path | None = None) -> Path:
        """The tiny setting's RoD run in NeMo-RL's form."""
        optimizer = {"lr": 3e-3, "min_lr": 3e-4, "bf16": False}
        optimizer |= {"use_distributed_optimizer": False, "use_precision_aware_optimizer": False}
        values = {
            "rod": {
                "worker": "cpu_worker.CpuWorker",
                "blocks": str(self.tiny.blocks),
                "references": [str(folder) for folder in self.tiny.references],
                "out": str(out),
                "steps": STEPS,
                "seed": 7,
                "warmup_fraction": 0.1,
                "scoring": {"micro_batch_size": 4},
                "validation": {"every": 10, "blocks": 8},
            },
            "policy": {
                "model_name": str(model or self.tiny.base),
                "train_global_batch_size": BATCH,
                "train_micro_batch_size": 2,
                "max_total_sequence_length": 64,
                "precision": "float32",
                "megatron_cfg": {"optimizer": optimizer},
            },
            "checkpointing": {"save_period": 8},
            "cluster": {"gpus_per_node": 2, "num_nodes": 1},
        }
        out.mkdir(parents=True, exist_ok=True)
        path = out / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def start(self, command: str, *arguments: object, fault: str = "none:0:0") -> subprocess.Popen:
        return subprocess.Popen(
            [*CLI, command, *map(str, arguments)],
            env={**self.environment, "TEST_FAULT": fault},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *arguments: object) -> str:
        process = self.start(command, *arguments)
        try:
            output, _ = process.communicate(timeout=1000)
        finally:
            process.kill()
        assert process.returncode == 0, output[-5000:]
        return output

    def train(self, name: str, *overrides: str) -> Path:
        out = self.tiny.root / name
        self.run("train", "--config", self.recipe(out), *overrides)
        return out


@pytest.fixture(scope="module")
def runs(tiny: Setting, environment: dict[str, str]) -> Runs:
    return Runs(tiny, environment)


@pytest.fixture(scope="module")
def in_workers(runs: Runs) -> Path:
    return runs.train("nemo_rl")


def records(folder: Path) -> list[Any]:
    return list(Curriculum.open(folder / "curriculum.rod", read_only=True))


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not key.startswith(("timing/", "rod/overhead"))
        }
        for line in lines
    ]


def chosen_ids(folder: Path) -> list[list[int]]:
    return [record.block_ids[record.chosen].tolist() for record in records(folder)]


def test_stock_worker_has_what_the_extension_uses() -> None:
    """Read, not run: the stock worker needs CUDA."""
    workers = Path(CHECKOUT) / "nemo_rl" / "models" / "policy" / "workers"
    tree = ast.parse((workers / "megatron_policy_worker.py").read_text())
    (worker,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "MegatronPolicyWorkerImpl"
    )
    methods = {node.name: node for node in worker.body if isinstance(node, ast.FunctionDef)}
    assert {"data", "loss_fn", "gbs", "mbs"} <= {arg.arg for arg in methods["train"].args.args}
    init = ast.unparse(methods["__init__"])
    assert all(f"self.{name}" in init for name in ("model", "cfg", "megatron_bridge"))
    train = ast.unparse(methods["train"])
    assert all(f"'{key}'" in train for key in ("global_loss", "grad_norm", "all_mb_metrics", "lr"))
    assert not any(name.startswith("rod_") for name in methods)


def test_same_blocks_as_megatron_bridge(tiny: Setting, in_workers: Path) -> None:
    bridge = tiny.rod("single", Parallel())
    assert len(bridge) == STEPS
    assert chosen_ids(in_workers) == chosen_ids(tiny.root / "single")
    for one, other in zip(bridge, records(in_workers), strict=True):
        assert abs(one.score - other.score).max() < 1e-5


def test_same_metrics_as_megatron_bridge(tiny: Setting, in_workers: Path) -> None:
    if not (tiny.root / "single").exists():
        tiny.rod("single", Parallel())
    for ours, theirs in zip(rows(in_workers), rows(tiny.root / "single"), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("choose_in", ["workers", "driver"])
def test_stock_worker_chooses_the_same_blocks(
    tiny: Setting, environment: dict[str, str], in_workers: Path, choose_in: str
) -> None:
    """NeMo-RL's own worker class and its own `train`, with the Megatron that the checkout pins."""
    pinned = os.pathsep.join([*map(str, pinned_megatron()), environment["PYTHONPATH"]])
    with_stock = {**environment, "PYTHONPATH": pinned}
    probe = [sys.executable, "-c", "import nemo_rl, stock_worker"]
    found = subprocess.run(probe, env=with_stock, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(f"needs newer packages than these: {found.stderr.splitlines()[-1]}")
    out = Runs(tiny, with_stock).train(
        f"nemo_rl_stock_{choose_in}",
        "rod.worker=stock_worker.StockWorker",
        f"rod.choose_in={choose_in}",
        "policy.logprob_batch_size=4",
    )
    assert chosen_ids(out) == chosen_ids(in_workers)


def pinned_megatron() -> list[Path]:
    """Where a recursive clone has Megatron-Bridge and Megatron-LM."""
    third = Path(CHECKOUT) / "3rdparty"
    bridge = third / "Megatron-Bridge-workspace" / "Megatron-Bridge"
    own = third / "Megatron-LM-workspace" / "Megatron-LM"
    core = own if (own / "megatron").is_dir() else bridge / "3rdparty" / "Megatron-LM"
    if not (core / "megatron").is_dir() or not (bridge / "src").is_dir():
        pytest.skip("the checkout has no submodules: git submodule update --init --recursive")
    return [bridge / "src", core]


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_same_blocks_in_other_layouts(runs: Runs, in_workers: Path, layout: str) -> None:
    out = runs.train(f"nemo_rl_{layout}", f"policy.megatron_cfg.{layout}_model_parallel_size=2")
    assert chosen_ids(out) == chosen_ids(in_workers)


def test_driver_chooses_the_same_blocks(runs: Runs, in_workers: Path) -> None:
    out = runs.train("nemo_rl_driver", "rod.choose_in=driver", "policy.logprob_batch_size=4")
    assert chosen_ids(out) == chosen_ids(in_workers)
    for one, other in zip(rows(out), rows(in_workers), strict=True):
        # at the base all scores of replay are 0, up to rounding here: their ranks mean nothing
        at_base = [key for key in one if one["step"] == 0 and key.endswith("/rank_correlation")]
        assert len(at_base) == 3 * (one["step"] == 0)
        for key in at_base:
            del one[key], other[key]
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_logger_gets_the_metrics(in_workers: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # its hyper-parameters lie in a folder of their own
    folders = {path.parent for path in in_workers.rglob("events.out.tfevents*")}
    logs = [EventAccumulator(str(folder)).Reload() for folder in folders]
    (events,) = [log for log in logs if "train/loss" in log.Tags()["scalars"]]
    logged = [event.value for event in events.Scalars("train/loss")]
    assert logged == pytest.approx([row["train/loss"] for row in rows(in_workers)])
    assert {"rod/replay_share", "validation/replay/chain_0/loss", "timing/train/total"} <= set(
        events.Tags()["scalars"]
    )


def kill_after(process: subprocess.Popen, out: Path, step: int) -> None:
    """Ends a driver with SIGKILL once it has done `step` steps."""
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline, "the run did not come to the step"
        time.sleep(0.02)
    process.kill()
    process.communicate()


def test_killed_and_resumed_equals_uninterrupted(runs: Runs, in_workers: Path) -> None:
    out = runs.tiny.root / "nemo_rl_killed"
    recipe = runs.recipe(out)
    kill_after(runs.start("train", "--config", recipe), out, 11)
    assert (out / "checkpoints" / "step_8").is_dir()
    runs.run("train", "--config", recipe)
    assert [row["step"] for row in rows(out)] == list(range(STEPS))
    assert rows(out) == rows(in_workers)
    whole, resumed = (folder / "curriculum.rod" for folder in (in_workers, out))
    assert whole.read_bytes() == resumed.read_bytes()


def test_asked_to_stop_saves(runs: Runs) -> None:
    out = runs.tiny.root / "nemo_rl_stopped"
    process = runs.start("train", "--config", runs.recipe(out), "rod.steps=2000")
    deadline = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    done = len(rows(out))
    assert f"stopped after step {done}: run it again" in output
    assert (out / "checkpoints" / f"step_{done}").is_dir()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise:1:3", "nemo-rod: rank 1: this worker was told to refuse"),
        ("kill:1:3", "nemo-rod: rank 1: its process died"),
        ("stop:1:3", "nemo-rod: rod_step: no answer of rank"),
    ],
)
def test_failed_worker_ends_the_driver_with_the_cause(
    runs: Runs, tmp_path: Path, fault: str, cause: str
) -> None:
    recipe = runs.recipe(tmp_path)
    process = runs.start("train", "--config", recipe, "rod.stall_seconds=25", fault=fault)
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and len(rows(tmp_path)) == 2):
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = time.monotonic()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert cause in output, output[-5000:]
    assert time.monotonic() - started < 60


def test_refusals_before_training_are_one_sentence(runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path)
    for override, sentence in (
        ("policy.max_total_sequence_length=128", "policy.max_total_sequence_length is 128, but"),
        ("policy.sequence_packing.enabled=true", "policy.sequence_packing.enabled is True: expect"),
        ("policy.train_global_batch_size=6", "policy.train_global_batch_size=6 does not divide"),
        ("rod.stepz=3", "Could not override 'rod.stepz'"),
        ("rod.references=[]", "no folder of references was given"),
    ):
        process = runs.start("train", "--config", recipe, override)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 2, output[-3000:]
        last = [line for line in output.splitlines() if line.startswith("nemo-rod: ")]
        assert last and sentence in last[-1], output[-3000:]


@pytest.mark.parametrize("choose_in", ["workers", "driver"])
def test_reference_losses_equal_megatron_bridges(runs: Runs, tiny: Setting, choose_in: str) -> None:
    out = tiny.root / f"nemo_rl_reference_{choose_in}"
    options = ("rod.role=replay", f"rod.choose_in={choose_in}")
    runs.run("reference", "--config", runs.recipe(out), *options)
    store = tiny.store
    found = References.open([tiny.references[0], out], store)
    expected = References.open(tiny.references, store)
    ids = range(store.num_adaptation, len(store))
    difference = abs(found[list(ids)] - expected[list(ids)])
    assert difference.max() < 1e-6


def test_a_step_of_2048_candidates_moves_under_100_kb(runs: Runs, tmp_path: Path) -> None:
    program = [sys.executable, "-W", "ignore", WORKERS / "nemo_rl_cpu" / "traffic.py"]
    sizes = ["policy.train_global_batch_size=1024", "policy.train_micro_batch_size=64"]
    output = subprocess.run(
        [*program, runs.recipe(tmp_path), *sizes, "rod.scoring.micro_batch_size=64"],
        env=runs.environment,
        capture_output=True,
        text=True,
        timeout=1000,
    ).stdout
    moved = json.loads(next(line for line in output.splitlines() if line.startswith('{"cand')))
    assert moved["candidates"] == 2048
    print(f"one step of 2048 candidates: {moved}")
    assert moved["received"] > 8192  # the scores at least: the meter saw them
    assert moved["sent"] + moved["received"] < 100_000


def test_hydra_recipe_trains_on_nemo_rl(runs: Runs, tmp_path: Path) -> None:
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
            "rod": {"worker": "cpu_worker.CpuWorker"},
            "policy": {
                "megatron_cfg": {
                    "optimizer": {"use_precision_aware_optimizer": False}
                }
            },
        },
    }  # fmt: skip
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\n" + yaml.safe_dump(settings)
    (tmp_path / "recipe" / "tiny_nemo_rl.yaml").write_text(text)
    options = ["--config-dir", tmp_path, "recipe=tiny_nemo_rl", f"run_dir={tmp_path / 'run'}"]
    for command in (["prepare"], ["pretrain"], ["train", "arm=no_replay"], ["reference"]):
        runs.run(command[0], *options, *command[1:])
    runs.run("train", *options, "arm=rod")
    arm = tmp_path / "run" / "arms" / "rod"
    assert len(records(arm)) == 6
    assert (arm / "hf" / "model.safetensors").exists()
