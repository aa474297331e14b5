"""Scoring that was killed, at any moment and again and again, ends in the files of a whole run.

A real job each time: the real model, store, logs and compaction. Where many moments are tried, the
processes of all attempts are forked from one that has torch and Megatron loaded already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from test_resume import kill_when
from tiny import LAYOUTS, Setting

from nemo_rod.selection import References


def job(tiny: Setting, out: Path, layout: str) -> Path:
    """Writes the job that scores the tiny setting's replay with its base."""
    values = json.loads((tiny.references[1] / "job.json").read_text())
    values |= {"out": str(out), "parallel": vars(LAYOUTS[layout])}
    out.mkdir(exist_ok=True)
    (out / "job.json").write_text(json.dumps(values))
    return out / "job.json"


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "job.json"
    }


KILLED = """
import json, os, random, signal, sys
from pathlib import Path
import torch.distributed as dist
import nemo_rod.megatron.forward_jobs  # most of what a start takes
from nemo_rod.megatron.__main__ import main

steps = 0

def deadly(name, owner, at):
    real = getattr(owner, name)
    def call(*arguments, **more):
        global steps
        steps += 1
        if steps == at:
            if name == "write":  # torn: the first half gets there
                real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)
    setattr(owner, name, call)

def rank(job, number, size, port, at):
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }
    for name in ("write", "fsync", "replace", "truncate", "posix_fallocate"):
        deadly(name, os, at)
    deadly("unlink", Path, at)
    sys.argv = ["job", job]
    return main()

def attempt(job, size, dice):
    '''Whether the job came to its end; if one rank is killed, so are the others.'''
    # a whole run takes some 15 writes, and compaction 17 steps
    at = [dice.randint(1, int(sys.argv[3])) for _ in range(size)]
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
    whole = True
    while ranks:
        child, status = os.wait()
        del ranks[child]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the job failed"
        elif whole:
            whole = False
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return whole

dice, kills = random.Random(int(sys.argv[2])), 0
for job in sys.argv[4:]:
    while not attempt(job, int(sys.argv[1]), dice):
        kills += 1
        assert kills < 200
print("kills", kills)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "seed"), [("single", 0), ("dp2", 1), ("pp2", 2)])
def test_killed_at_twenty_random_steps_ends_in_the_same_files(
    tiny: Setting, layout: str, seed: int
) -> None:
    name, size = f"{layout}_{seed}", LAYOUTS[layout].world_size
    whole = tiny.root / f"whole_{name}"
    tiny.torchrun(size, "nemo_rod.megatron", job(tiny, whole, layout))
    broken = [tiny.root / f"broken_{name}_{i}" for i in range(8)]
    jobs = [str(job(tiny, folder, layout)) for folder in broken]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(size), str(seed), "30", *jobs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 20, done.stdout[-100:]
    for folder in broken:
        assert files(folder) == files(whole), folder


def logged(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank-*.log"))


@pytest.mark.slow
def test_killed_in_one_layout_and_finished_in_others(tiny: Setting) -> None:
    """Under the real launcher, and with another number of replicas every time."""
    whole, broken = tiny.root / "whole_layouts", tiny.root / "broken_layouts"
    tiny.torchrun(1, "nemo_rod.megatron", job(tiny, whole, "single"))
    for layout in ("dp2", "pp2", "dp2"):
        file, before = job(tiny, broken, layout), logged(broken)
        begun = lambda before=before: logged(broken) != before  # noqa: E731
        kill_when(begun, file, LAYOUTS[layout].world_size, seconds=0.05)
    assert len(list(broken.glob("rank-*.log"))) == 2, "every replica writes a log"
    tiny.torchrun(1, "nemo_rod.megatron", job(tiny, broken, "single"))
    assert files(broken) == files(whole)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2"])
def test_references_are_the_same_in_every_layout(tiny: Setting, layout: str) -> None:
    out = tiny.root / f"references_{layout}"
    tiny.torchrun(LAYOUTS[layout].world_size, "nemo_rod.megatron", job(tiny, out, layout))
    if layout != "tp2":  # the order in which a matrix's parts are added up shows in the last bits
        assert files(out) == files(tiny.references[1])
        return
    (ids,) = np.nonzero(tiny.store.is_replay(np.arange(len(tiny.store))))
    one, other = (
        References.open([tiny.references[0], folder], tiny.store)[ids]
        for folder in (out, tiny.references[1])
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_job_that_only_missed_its_hand_over_clears_up(tiny: Setting) -> None:
    out = tiny.root / "cleared"
    file = job(tiny, out, "single")
    for name, data in files(tiny.references[1]).items():
        (out / name).write_bytes(data)
    (out / "rank-00000.log").write_bytes(b"left by a run that was killed right after compacting")
    tiny.torchrun(1, "nemo_rod.megatron", file)
    assert files(out) == files(tiny.references[1])
