"""What a process leaves behind."""

import subprocess
import sys

from places import ROOT

PROGRAM = """
import pathlib, subprocess, sys
from nemo_rod.hosts.ray.ray_node import adopt_orphans, kill_children
if sys.argv[1] == "adopt":
    adopt_orphans()
command = "setsid sleep 300 >/dev/null & echo $!"
orphan = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True).stdout.strip()
child = subprocess.Popen(["sleep", "300"])
kill_children()
print(orphan, child.wait(), pathlib.Path("/proc", orphan).exists())
subprocess.run(["kill", "-9", orphan], stderr=subprocess.DEVNULL)
"""


def ended(how: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    _orphan, *lines = done.stdout.split()
    return lines


def test_orphans_end_with_the_process_that_adopts_them() -> None:
    assert ended("leave")[1] == "True"
    assert ended("adopt")[1] == "False"
