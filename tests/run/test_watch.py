"""A frozen rank 0 is found, by the other ranks and by the command; what a process leaves behind."""

import locale
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from mishaps import largest_file
from places import ROOT, Later
from tiny import configured

from nemo_rod.config import Launcher
from nemo_rod.jobs import EvaluateJob
from nemo_rod.run.processes.torchrun import run_process
from nemo_rod.run.stage_log import StageLog
from nemo_rod.signals import STOP_SIGNALS, HeartbeatFile

distributed = Later("torch.distributed")
watch = Later("nemo_rod.megatron.watch")

FREEZES = """
import os, signal
from nemo_rod.signals import HeartbeatFile
HeartbeatFile.from_environment().touch()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGSTOP)
"""
ASKS = FREEZES.replace("\nos.kill", "\nos.kill(os.getppid(), signal.SIGTERM)\nos.kill")
LEAVES = """
import time
from nemo_rod.signals import HeartbeatFile
heartbeat = HeartbeatFile.from_environment()
heartbeat.touch()
heartbeat.remove()
time.sleep(3)
"""


@pytest.mark.parametrize("is_fork", [False, True])
@pytest.mark.parametrize("program", [FREEZES, LEAVES, ASKS])
def test_command_finds_its_frozen_process(tmp_path, monkeypatch, program, is_fork):
    monkeypatch.setattr(HeartbeatFile, "patience", 1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "program.py").write_text(program)
    command = (
        [sys.executable, "-P", "-m", "program"] if is_fork else [sys.executable, "-c", program]
    )
    ending = run_process(command, tmp_path / "log", Launcher())
    assert ("stopped" in ending) == (program is ASKS and not is_fork)  # the server's child
    gone = None if program == LEAVES else "rank 0: had no heartbeat for 1 s"
    assert ending.get("killed") == gone


def test_signals_to_every_process_leave_the_server_of_forks_alone(tmp_path, monkeypatch):
    """Slurm sends them to all processes of a job, near the limit and at a preemption."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import gc, os; print(os.getppid()); assert gc.get_freeze_count() > 10**5"
    (tmp_path / "tells.py").write_text(program)  # which also shares the memory of the imports
    for _ in range(2):
        assert (
            run_process([sys.executable, "-P", "-m", "tells"], tmp_path / "log", Launcher()) == {}
        )
        server = (tmp_path / "log").read_text().split()
        for number in STOP_SIGNALS:
            os.kill(int(server[-1]), number)
    assert server[0] == server[1]


def test_a_job_goes_on_where_its_log_cannot(tmp_path, capfd):
    program = "import os; os.write(1, b'%s' % (b'x' * 9 + b'\\n') * 20000 + b'progress: over\\n')"
    with largest_file(4096):
        assert run_process([sys.executable, "-c", program], tmp_path / "log", Launcher()) == {}
    told = f"{tmp_path}/log lacks lines of this job: File too large.\nprogress: over\n"
    assert capfd.readouterr().err == told


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_log_is_utf_8_in_any_locale(tmp_path, monkeypatch, is_fork):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tells.py").write_text(program := "import os; os.write(1, 'ü'.encode())")
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        command = ["-P", "-m", "tells"] if is_fork else ["-c", program]
        run_process([sys.executable, *command], tmp_path / "log", Launcher())
    finally:
        locale.setlocale(locale.LC_CTYPE, "")
    assert (tmp_path / "log").read_text("utf-8") == "ü"


def test_torchruns_own_folder_is_gone_with_the_command(tmp_path, monkeypatch):
    """Unless told where, it leaves one in the temporary folder for every job.

    Options of another torchrun are left out: it would wait for as many nodes.
    """
    from torch.distributed.run import get_args_parser

    monkeypatch.setenv("PET_NNODES", "2")
    program = (
        "import os; print(os.environ['PET_LOG_DIR'], os.path.isdir(os.environ['PET_LOG_DIR']));"
        "assert 'PET_NNODES' not in os.environ"
    )
    assert run_process([sys.executable, "-c", program], tmp_path / "log", Launcher()) == {}
    folder, was_there = (tmp_path / "log").read_text().split()
    assert was_there == "True" and not Path(folder).exists()
    action = next(a for a in get_args_parser()._actions if a.dest == "log_dir")
    assert type(action).__name__ == "env"  # torchrun reads PET_LOG_DIR


def test_a_temporary_folder_too_long_for_sockets_is_named(tmp_path):
    (folder := tmp_path / ("x" * 100)).mkdir()
    program = "import os; from nemo_rod.cpu.forks import Fork; Fork(['this'], os.environ)"
    command, env = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    assert f"ValueError: TMPDIR={folder} is too long for the names of sockets" in done.stderr


@pytest.mark.parametrize("home", ["/proc/nohome", "here", "~"])
def test_locks_of_bridge_need_no_home(home, tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_CONFIG_LOCK_DIR", raising=False)
    monkeypatch.setenv("HOME", home if home.startswith("/") else str(tmp_path / home))
    if home == "~":
        monkeypatch.setattr(os.path, "expanduser", str)
    names = ("PET_LOG_DIR", "MEGATRON_CONFIG_LOCK_DIR", "HOME")
    program = f"import os; print(*map(os.environ.get, {names}))"
    assert run_process([sys.executable, "-c", program], tmp_path / "log", Launcher()) == {}
    folder, locks, own = (tmp_path / "log").read_text().split()
    assert locks == (folder if home.startswith("/") else "None")
    assert (own == folder) == (home == "~")


def test_other_ranks_find_a_frozen_rank_0(monkeypatch, capsys):
    monkeypatch.setattr("nemo_rod.megatron.watch.GONE_SECONDS", 2.0)
    store, left = distributed.HashStore(), threading.Event()
    store.set("alive/0", f"{time.time_ns()} 3 ")  # and nothing after it
    other = watch.Watch(store, 1, 2, stall_seconds=60, leave=lambda status: left.set())
    other.start()
    reported = store.check(["alive/1"])  # at once: who never has may still be starting
    assert left.wait(60)
    other.close()
    assert reported
    assert "nemo-rod error on rank 0: its process is gone" in capsys.readouterr().out


def test_rank_may_be_silent_for_as_long_as_one_call_in_c(monkeypatch):
    store, heard, now = distributed.HashStore(), {}, [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    first = watch.Watch(store, 0, 2, stall_seconds=600)
    store.set("alive/0", "1 5 ")
    store.set("alive/1", "1 3 ")
    for now[0] in (0.0, 45.0):  # a checkpoint of a large model is planned and pickled
        first._check(heard, {})
    assert not store.check([watch.FAULT_KEY])
    store.set("alive/0", "2 5 ")
    now[0] = 61.0
    first._check(heard, {})
    assert store.get(watch.FAULT_KEY) == b"rank 1: its process is gone"


@pytest.mark.parametrize("world_size", [2, 1024])
def test_rank_0_asks_as_often_for_two_ranks_as_for_a_thousand(world_size):
    store = distributed.HashStore()
    for rank in range(world_size):
        store.set(f"alive/{rank}", f"{rank} 5 ")
    counted = Mock(wraps=store)
    first = watch.Watch(counted, 0, world_size, stall_seconds=60)
    for started in (range(world_size), [rank for rank in range(world_size) if rank != 1]):
        heard: dict[int, tuple[str, float]] = {}
        first._check(heard, {})
        last = started[-1]
        assert [*heard] == [*started] and heard[last][0] == str(last)
        assert len(counted.method_calls) == 2 or 1 not in heard
        store.delete_key("alive/1")  # as one that has not started yet


def test_reader_of_a_slow_disk_is_named_before_the_watch_ends_it(monkeypatch, capsys):
    """By a clock that goes as the watch of rank 0 waits: no machine is too slow for it."""
    store, seconds = distributed.HashStore(), [0.0]
    first, *others = (watch.Watch(store, rank, 3, stall_seconds=8) for rank in range(3))

    def wait(timeout: float) -> bool:
        seconds[0] += timeout
        for other in others:
            other._report()
        return first._stop.is_set()

    clock = SimpleNamespace(monotonic=lambda: seconds[0], time_ns=time.time_ns)
    monkeypatch.setattr("nemo_rod.megatron.watch.time", clock)
    monkeypatch.setattr(first._stop, "wait", wait)
    monkeypatch.setattr(first, "leave", lambda status: first._stop.set())
    for each in (first, *others):
        each.beat()
    others[-1].announce("reads blocks of /slow/tokens-00007.bin")  # the others wait for it
    first._run()
    where = "while it reads blocks of /slow/tokens-00007.bin"
    limit = "launcher.stall_seconds=8"
    assert capsys.readouterr().out.splitlines() == [
        f"{watch.PREFIX}rank 2: no progress for 5 s {where}; {limit} ends the job",
        f"nemo-rod error on rank 2: stalled for 9 s {where}, longer than {limit}",
    ]


HOLDS = """
import sys
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.run.processes.torchrun import run_process
from nemo_rod.run.stage_log import StageLog
with StageLog(Path(sys.argv[1]), "rod").only_one():
    run_process([sys.executable, *sys.argv[2:]], Path(sys.argv[1]) / "log", Launcher())
"""
SLEEPS = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"


@pytest.mark.parametrize(
    "program", [("-c", SLEEPS), ("-P", "-m", "sleeps")]
)  # the second is a fork
def test_lock_of_a_stage_outlives_a_killed_command(tmp_path, monkeypatch, program):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    left = tempfile.TemporaryDirectory()  # by who is killed; short enough for the path of a socket
    monkeypatch.setenv("TMPDIR", left.name)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    (tmp_path / "torch.py").write_text("raise ImportError('the server of forks begins without it')")
    command = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path), *program])
    log = tmp_path / "log"
    while not (log.exists() and "up" in log.read_text()):
        assert command.poll() is None
        time.sleep(0.1)
    below = psutil.Process(command.pid).children(recursive=True)
    child = max(below, key=psutil.Process.create_time)
    command.kill()
    command.wait()
    assert StageLog(tmp_path, "rod").is_held()
    child.kill()
    psutil.wait_procs([child], timeout=30)
    assert not StageLog(tmp_path, "rod").is_held()
    left.cleanup()


@pytest.mark.parametrize("stall_seconds", [0.0, 1.0, 1800.0, 86_400.0])
def test_collectives_wait_longer_than_the_watch(stall_seconds):
    config = configured(launcher__stall_seconds=stall_seconds)
    job = EvaluateJob(name="", config=config, blocks="", out="", models={})
    never = 7 * 86_400  # what no watch ends still ends some day
    assert 60 * job.collective_minutes >= (stall_seconds + 600 if stall_seconds else never)


def test_the_process_group_has_the_timeout_of_its_job(monkeypatch):
    from nemo_rod.megatron import __main__ as program

    class Begun(Exception):
        pass

    def begin(*_: Any, timeout: timedelta, **__: Any) -> None:
        raise Begun(timeout)

    monkeypatch.setattr(program.dist, "init_process_group", begin)
    with pytest.raises(Begun) as begun:
        program._run(SimpleNamespace(collective_minutes=40), None)  # type: ignore[arg-type]
    assert begun.value.args == (timedelta(minutes=40),)


PROGRAM = """
import pathlib, subprocess, sys
from nemo_rod.hosts.nemo_rl.ray_node import adopt_orphans, kill_children
if sys.argv[1] == "adopt":
    adopt_orphans()
command = "setsid sleep 300 >/dev/null & echo $!"
orphan = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True).stdout.strip()
child = subprocess.Popen(["sleep", "300"])
kill_children()
print(orphan, child.wait(), pathlib.Path("/proc", orphan).exists())
subprocess.run(["kill", "-9", orphan], stderr=subprocess.DEVNULL)
"""


STUBBORN = """
import signal, sys
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.run.processes.torchrun import run_process
apart = "setsid sh -c 'echo progress: up; sleep 300' & wait; sleep 300"
ignores = f"trap '' TERM; {apart}"
print(run_process(["sh", "-c", ignores], Path(sys.argv[1], "logs", "log"), Launcher()))
"""


def test_a_second_ctrl_c_ends_at_once_what_does_not_stop(tmp_path):
    command = [sys.executable, "-c", STUBBORN, str(tmp_path)]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    assert running.stderr.readline() == "progress: up\n"
    running.send_signal(signal.SIGINT)
    assert "(Ctrl-C again: at once)" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    assert "it was asked to stop, and ended (by the second Ctrl-C)" in out


def ended(how: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    _orphan, *lines = done.stdout.split()
    return lines


def test_orphans_end_with_the_process_that_adopts_them():
    assert ended("leave")[1] == "True"
    assert ended("adopt")[1] == "False"
