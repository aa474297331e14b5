"""A frozen rank 0 is found: by the other ranks, and by the command that started it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from nemo_rod.config import Launcher
from nemo_rod.jobs import EvaluateJob
from nemo_rod.processes.signals import SignOfLife
from nemo_rod.processes.torchrun import run_process
from nemo_rod.recipe.attempts import Record

FREEZES = """
import os, signal
from nemo_rod.processes.signals import SignOfLife
SignOfLife.of_this_job().give()
os.kill(os.getpid(), signal.SIGSTOP)
"""
LEAVES = """
import time
from nemo_rod.processes.signals import SignOfLife
sign = SignOfLife.of_this_job()
sign.give()
sign.end()
time.sleep(5)
"""


@pytest.mark.parametrize("program", [FREEZES, LEAVES])
def test_command_finds_its_frozen_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(SignOfLife, "patience", 2)
    said = run_process([sys.executable, "-c", program], tmp_path / "log", Launcher())
    gone = {"killed": "rank 0: gave no sign of life for 2 s"}
    assert said == (gone if program is FREEZES else {})


def test_other_ranks_find_a_frozen_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import HashStore

    from nemo_rod.megatron import watch

    monkeypatch.setattr(watch, "FIRST_GONE_SECONDS", 2.0)
    store, left = HashStore(), threading.Event()
    store.set("alive/0", f"{time.time_ns()} 3")  # and nothing after it
    other = watch.Watch(store, 1, 2, stall_seconds=60, leave=lambda status: left.set())
    other.start()
    assert left.wait(60)
    other.close()
    assert "nemo-rod error on rank 0: its process is gone" in capsys.readouterr().out


HOLDS = """
import sys
from dataclasses import fields
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.jobs import EvaluateJob
from nemo_rod.processes.torchrun import run_process
from nemo_rod.recipe.attempts import Record
child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"
with Record(Path(sys.argv[1]), "rod").only_one():
    run_process([sys.executable, "-c", child], Path(sys.argv[1]) / "log", Launcher())
"""


def test_lock_of_a_stage_outlives_a_killed_command(tmp_path: Path) -> None:
    command = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)])
    log = tmp_path / "log"
    while not (log.exists() and "up" in log.read_text()):
        assert command.poll() is None
        time.sleep(0.1)
    (child,) = psutil.Process(command.pid).children()
    command.kill()
    command.wait()
    assert Record(tmp_path, "rod").is_held()
    child.kill()
    psutil.wait_procs([child], timeout=30)
    assert not Record(tmp_path, "rod").is_held()


@pytest.mark.parametrize("stall_seconds", [0.0, 1.0, 1800.0, 86_400.0])
def test_collectives_wait_longer_than_the_watch(stall_seconds: float) -> None:
    job = EvaluateJob(
        **{field.name: None for field in fields(EvaluateJob)} | {"stall_seconds": stall_seconds}
    )
    never = 7 * 86_400  # what no watch ends still ends some day
    assert 60 * job.collective_minutes >= (stall_seconds + 600 if stall_seconds else never)
