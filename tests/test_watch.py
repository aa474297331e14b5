"""A frozen rank 0 is found: by the other ranks, and by the command that started it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_rod.config import Launcher
from nemo_rod.processes.signals import SignOfLife
from nemo_rod.processes.torchrun import run_process

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

    monkeypatch.setattr(watch, "GONE_SECONDS", 2.0)
    store, left = HashStore(), threading.Event()
    store.set("alive/0", f"{time.time_ns()} 3")  # and nothing after it
    other = watch.Watch(store, 1, 2, stall_seconds=60, leave=lambda status: left.set())
    other.start()
    assert left.wait(60)
    other.close()
    assert "nemo-rod error on rank 0: its process is gone" in capsys.readouterr().out
