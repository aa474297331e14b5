"""A job that is stopped, fails, dies or stalls: it ends everywhere, soon, and says who and why.

Every fault is a real one, given to the real command on two processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tiny import LAYOUTS, Setting

from nemo_rod.config import Launcher
from nemo_rod.launch.local import run_job

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.jobs import Stopped
from nemo_rod.launch.local import run_job
try:
    run_job(Path(sys.argv[1]), world_size=2, launcher=Launcher(), log=Path(sys.argv[2]))
except (RuntimeError, Stopped) as error:
    sys.exit(str(error))
"""


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
        assert process.poll() is None, "the job ended by itself"
        assert time.monotonic() < deadline, "the job did not come to the step"
        time.sleep(0.02)


def is_rank(process: psutil.Process) -> bool:
    return "nemo_rod.megatron" in process.cmdline() and "-u" in process.cmdline()


class Run:
    """A RoD run of two replicas under the local launcher, in a process of its own."""

    def __init__(self, tiny: Setting, name: str) -> None:
        self.out = tiny.root / name
        job = tiny.rod_job(self.out, LAYOUTS["dp2"], stall_seconds=15)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(job), str(self.out / "log")],
            stderr=subprocess.PIPE,
            text=True,
        )

    def reach(self, step: int) -> None:
        wait_for_step(self.out, step, self.process)

    def ranks(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(filter(is_rank, found), key=lambda rank: rank.environ()["RANK"])

    def ending(self) -> tuple[str, float]:
        """What the command said, and how long it took to end."""
        started = time.monotonic()
        _, error = self.process.communicate(timeout=70)
        assert self.process.returncode != 0
        return error, time.monotonic() - started


@pytest.fixture
def run(tiny: Setting, request: pytest.FixtureRequest) -> Iterator[Callable[[], Run]]:
    runs: list[Run] = []

    def start() -> Run:
        runs.append(Run(tiny, f"fault_{request.node.name}_{len(runs)}"))
        return runs[-1]

    yield start
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()


def nothing_left(ranks: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(ranks, timeout=10)
    return not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_asked_to_stop_saves_and_says_so(run: Callable[[], Run], number: signal.Signals) -> None:
    job = run()
    job.reach(3)
    ranks = job.ranks()
    os.kill(job.process.pid, number)
    error, seconds = job.ending()
    assert "was asked to stop and has saved: run it again" in error
    assert (job.out / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    assert seconds < 60
    assert nothing_left(ranks)


def test_killed_rank_is_named(run: Callable[[], Run]) -> None:
    job = run()
    job.reach(3)
    ranks = job.ranks()
    ranks[1].kill()
    error, seconds = job.ending()
    assert "rank 1: was ended by SIGKILL" in error
    assert seconds < 60
    assert nothing_left(ranks)


def test_frozen_rank_is_named(run: Callable[[], Run]) -> None:
    job = run()
    job.reach(3)
    ranks = job.ranks()
    ranks[1].suspend()
    error, seconds = job.ending()
    assert "rank 1: its process is gone" in error
    assert seconds < 60
    assert nothing_left(ranks)


def test_killed_command_takes_its_job_along(run: Callable[[], Run]) -> None:
    job = run()
    job.reach(3)
    ranks = job.ranks()
    job.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive


def test_refusal_of_a_rank_is_its_sentence(tiny: Setting, tmp_path: Path) -> None:
    job = tiny.rod_job(tmp_path / "out", LAYOUTS["dp2"])
    job.write_text(job.read_text().replace(str(tiny.references[1]), str(tiny.references[0])))
    with pytest.raises(RuntimeError, match=r"rank \d: .*references"):
        run_job(job, world_size=2, launcher=Launcher(), log=tmp_path / "log")
