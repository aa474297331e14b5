"""Torchrun in a fork of the process that has imported Megatron: as good as a program of its own."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

pytest.importorskip("megatron.core")

from nemo_rod.run.processes.start import Fork, start_torchrun
from nemo_rod.signals import KEPT_OPEN

RANK = """
import os, signal, sys, time
from nemo_rod.signals import end_with_parent
end_with_parent()
import megatron.core
say = lambda text: os.write(1, text.encode() + b"\\n")  # at once, beside the other rank
asked = os.environ["ASKED"]
say(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1]} {asked}")
print(f"server {os.path.basename(os.getcwd())}\\n", end="", file=sys.stderr)
if sys.argv[1] == "waits":
    signal.signal(signal.SIGTERM, lambda *_: (say("stopped"), os._exit(75)))
    time.sleep(600)
if sys.argv[1] == "forks":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if os.fork() == 0:
        say(f"helper keeps {signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])}")
        os._exit(0)
    os.wait()
if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
    os._exit(3)
"""


COMMAND = """
import sys, time
sys.path[:0] = [{here!r}, {package!r}]
import test_start
fork = test_start.start("waits")
test_start.line(fork, "rank")
print(fork._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
        child.kill()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that can be run, in the place of a job's."""
    folder = tmp_path / "a_rank"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def start(argument: str, asked: str = "one") -> Fork:
    options = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "a_rank", argument]
    return start_torchrun(command, {**os.environ, "ASKED": asked})


def server_of(fork: Fork) -> psutil.Process:
    found = psutil.Process(fork._process.pid).parent()
    assert found is not None
    return found


def line(fork: Fork, wanted: str) -> str:
    """What the fork said until a line has these words."""
    said = ""
    for text in fork.stdout:
        said += text
        if wanted in text:
            return said
    raise AssertionError(said)


def test_ranks_have_their_command_environment_folder_and_output(tmp_path: Path) -> None:
    for asked in ("one", "two"):
        fork = start("ends", asked)
        said = fork.stdout.read().splitlines()
        assert {f"rank 0 of 2 ends {asked}", f"rank 1 of 2 ends {asked}"} < set(said)
        assert said.count(f"server {tmp_path.name}") == 2
        assert fork.wait() == 0 == fork.poll()
    assert "ASKED" not in os.environ


def test_a_failure_is_told_as_torchrun_tells_it() -> None:
    fork = start("fails")
    said = fork.stdout.read()
    assert "failed (exitcode: 3) local_rank: 1" in said
    assert fork.wait() == 1


def test_helpers_of_a_rank_keep_its_signals_blocked() -> None:
    fork = start("forks")
    assert fork.stdout.read().count("helper keeps True") == 2
    assert fork.wait() == 0


def test_only_the_job_keeps_what_stays_open(tmp_path: Path) -> None:
    def is_free() -> bool:
        with open(tmp_path / "lock") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        KEPT_OPEN.append(lock.fileno())
        try:
            fork = start("waits")
        finally:
            KEPT_OPEN.clear()
    line(fork, "rank")
    assert not is_free()
    fork.terminate()
    fork.stdout.read()
    assert fork.wait() != 0
    assert is_free()


def test_stop_signals_reach_jobs_but_not_their_server() -> None:
    fork = start("waits")
    line(fork, "rank")
    line(fork, "rank")
    server = server_of(fork)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        server.send_signal(number)
    assert fork.poll() is None
    fork.terminate()
    assert "stopped" in fork.stdout.read()
    again = start("ends")
    assert server_of(again).pid == server.pid
    assert "rank 0 of 2" in again.stdout.read() and again.wait() == 0


def test_nothing_outlives_the_server() -> None:
    fork = start("waits")
    line(fork, "rank")
    family = with_children(fork._process.pid)
    server_of(fork).kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_nothing_outlives_the_command(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [
            sys.executable,
            "-c",
            COMMAND.format(here=str(Path(__file__).parent), package=str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    family = with_children(int(command.stdout.readline()))
    command.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def with_children(number: int | None) -> list[psutil.Process]:
    process = psutil.Process(number)
    return [process, *process.children(recursive=True)]


def test_models_run_where_megatron_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's image has Megatron in the environment of its workers alone."""
    from nemo_rod.config import Launcher
    from nemo_rod.run.processes import pythons, torchrun

    python = tmp_path / pythons.MEGATRON_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "workers: $*"\n')
    python.chmod(0o755)
    order = torchrun.Order("job.json", str(tmp_path / "log"), 2, 1)
    nodes = torchrun.Nodes.of_this_job()
    for variable, has_megatron, chosen in (
        (None, False, sys.executable),
        (tmp_path, True, sys.executable),
        (tmp_path / "none", False, sys.executable),
        (tmp_path, False, str(python)),
    ):
        monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
        if variable is not None:
            monkeypatch.setenv("NEMO_RL_VENV_DIR", str(variable))
        monkeypatch.setattr(pythons, "can_be_found", lambda module, has=has_megatron: has)
        assert torchrun.torchrun(order, nodes)[0] == chosen
    # started as a program: a fork of this process would be of this Python
    assert torchrun.run_torchrun(order, nodes, Launcher()) == {}
    assert (tmp_path / "log").read_text().startswith("workers: -m torch.distributed.run")
