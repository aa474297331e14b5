"""Runs scoring jobs that are killed at drawn steps, each again and again until it is whole.

    killed_worker.py SEED MOST SIZE:JOB[,SIZE:JOB ...] ...

Each argument is a folder's job, in the layouts of which one is drawn for every attempt. A rank is
killed at one of its first MOST steps on the disk; 0 kills none. The ranks are forks of this
process.
"""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import nemo_rod.megatron.forward_jobs  # noqa: F401 - most of what a start takes
from nemo_rod.megatron.__main__ import main
from nemo_rod.selection.references import folder

steps = 0


def deadly(name: str, owner: Any, at: int) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **more: Any) -> Any:
        global steps
        steps += 1
        if steps == at:
            if name == "write_bytes":  # torn: the first half gets there
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)

    setattr(owner, name, call)


def rank(job: str, number: int, size: int, port: int, at: int) -> int:
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    folder._SMALLEST = 16  # blocks of a part
    for name in ("fsync", "replace"):
        deadly(name, os, at)
    for name in ("unlink", "write_bytes"):
        deadly(name, Path, at)
    sys.argv = ["job", job]
    return main()


def attempt(job: str, size: int, dice: random.Random, most: int) -> bool:
    """Whether the job came to its end; if one rank is killed, so are the others."""
    at = [dice.randint(1, most) if most else 0 for _ in range(size)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {}
    for number in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = rank(job, number, size, store.port, at[number])
            finally:
                os._exit(status)
        ranks[child] = number
    whole, failed = True, False
    while ranks:
        child, status = os.wait()
        del ranks[child]
        if os.WIFEXITED(status):
            failed |= os.WEXITSTATUS(status) != 0
        elif whole:
            whole = False
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    assert not (whole and failed), "the job failed"  # a rank whose peer is killed fails as well
    return whole


def all_whole(seed: str, most: str, *folders: str) -> int:
    """Returns how often a job was killed."""
    dice, kills = random.Random(int(seed)), 0
    for layouts in folders:
        jobs = [layout.split(":", 1) for layout in layouts.split(",")]
        while True:
            size, job = dice.choice(jobs)
            if attempt(job, int(size), dice, int(most)):
                break
            kills += 1
            assert kills < 200
    return kills


if __name__ == "__main__":
    print("kills", all_whole(*sys.argv[1:]))
