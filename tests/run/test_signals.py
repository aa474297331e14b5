"""What a process leaves behind."""

import signal
import subprocess
import sys

from places import ROOT

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
