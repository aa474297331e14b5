"""Jobs that NeMo-RL's workers run on real Ray, with a checkout of NeMo-RL on the path."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from places import ROOT, WORKERS
from tiny import STEPS, Setting

from nemo_rod.config import Parallel
from nemo_rod.selection import Curriculum

PATIENCE = 900  # seconds; on a loaded machine Ray starts slowly

CHECKOUT = os.environ.get("NEMO_RL", "")
CPU = {"worker": "cpu_worker.CpuWorker"}
DP2 = Parallel(data=2, distributed_optimizer=False)
RUN_JOB = [sys.executable, "-W", "ignore", str(WORKERS / "nemo_rl_cpu" / "run_job.py")]
CLI = [sys.executable, "-W", "ignore", "-m", "nemo_rod.cli"]


@contextlib.contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
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
        "RAY_worker_niceness": "0",  # 15 starves it there
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
    head, begun = subprocess.Popen(command, env=shared, stdout=subprocess.DEVNULL), time.monotonic()
    try:
        deadline = time.monotonic() + PATIENCE
        status = [ray, "status", f"--address=127.0.0.1:{port}"]
        while subprocess.run(status, env=shared, capture_output=True).returncode != 0:
            assert time.monotonic() < deadline, "Ray did not start"
            if head.poll() is not None:  # it gives up after 30 s, too soon on a loaded machine
                assert time.monotonic() - begun > 20, "Ray ended at once: see its error"
                head = subprocess.Popen(command, env=shared, stdout=subprocess.DEVNULL)
                begun = time.monotonic()
            time.sleep(1)
        yield {**shared, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for member in [*psutil.Process(head.pid).children(recursive=True), head]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        head.wait()
        shutil.rmtree(temp, ignore_errors=True)


class Runs:
    """Writes jobs of the tiny setting, and runs them on NeMo-RL or by the command line."""

    def __init__(self, tiny: Setting, environment: dict[str, str]) -> None:
        self.tiny, self.environment = tiny, environment
        self.started: list[subprocess.Popen[str]] = []

    def job(
        self, out: Path, own: dict[str, Any] = CPU, parallel: Parallel = DP2, **options: Any
    ) -> list[object]:
        """The tiny setting's RoD job: its file, and the section `nemo_rl` beside it."""
        options = {"checkpoint__every": 8, **options}
        return [self.tiny.rod_job(out, parallel, **options), json.dumps(own)]

    def start(
        self, *words: object, program: list[str] = RUN_JOB, fault: str = "none:0:0"
    ) -> subprocess.Popen[str]:
        for process in self.started:  # left by a failed test
            process.kill()
        process = subprocess.Popen(
            [*program, *map(str, words)], env={**self.environment, "TEST_FAULT": fault},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        """Ends the processes that still run."""
        for process in self.started:
            process.kill()

    def run(self, *words: object, program: list[str] = RUN_JOB) -> str:
        process = self.start(*words, program=program)
        try:
            output, _ = process.communicate(timeout=1000)
        finally:
            process.kill()
        assert process.returncode == 0, output[-5000:]
        return output

    def train(self, name: str, *own: dict[str, Any], **options: Any) -> Path:
        out = self.tiny.root / name
        self.run(*self.job(out, *own, **options))
        return out


def records(folder: Path) -> list[Any]:
    return list(Curriculum.open(folder / "curriculum.rod", read_only=True))


def rows(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step that have a value, but for those of time and memory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if value is not None
            and not key.startswith(("timing/", "throughput/", "memory/", "rod/overhead"))
        }
        for line in lines
    ]


def assert_same_choices_as_bridge(tiny: Setting, out: Path) -> None:
    """A run chose the blocks that Megatron-Bridge chooses, by the same scores."""
    bridge = tiny.single()
    assert len(bridge) == STEPS
    assert chosen_ids(out) == chosen_ids(tiny.root / "single")
    for one, other in zip(bridge, records(out), strict=True):
        assert abs(one.score - other.score).max() < 1e-5


def chosen_ids(folder: Path) -> list[list[int]]:
    return [record.block_ids[record.chosen].tolist() for record in records(folder)]


def wait_for_steps(process: subprocess.Popen, out: Path, steps: int) -> None:
    """Returns once a driver has done a number of steps."""
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline, "the run did not come to the step"
        time.sleep(0.02)


def kill_after(process: subprocess.Popen, out: Path, step: int) -> None:
    """Ends a driver with SIGKILL once it has done `step` steps."""
    wait_for_steps(process, out, step)
    process.kill()
    process.communicate()
