"""Scoring that was killed, at any moment and again and again, ends in the files of a whole run.

A real job each time: the real model, store and parts. The processes of all attempts are forked from
one that has torch and Megatron loaded already.
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
from tiny import LAYOUTS, Setting

from nemo_rod.selection import References


def job(tiny: Setting, out: Path, layout: str) -> Path:
    """Writes the job that scores the tiny setting's replay with its base."""
    values = json.loads((tiny.references[1] / "job.json").read_text())
    values["out"], values["config"]["parallel"] = str(out), vars(LAYOUTS[layout])
    file = out.with_name(f"{out.name}_{layout}.json")
    file.write_text(json.dumps(values))
    return file


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
from nemo_rod.selection.references import folder

steps = 0

def deadly(name, owner, at):
    real = getattr(owner, name)
    def call(*arguments, **more):
        global steps
        steps += 1
        if steps == at:
            if name == "write_bytes":  # torn: the first half gets there
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)
    setattr(owner, name, call)

def rank(job, number, size, port, at):
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }
    folder._SMALLEST = 16  # blocks of a part
    for name in ("fsync", "replace"):
        deadly(name, os, at)
    for name in ("unlink", "write_bytes"):
        deadly(name, Path, at)
    sys.argv = ["job", job]
    return main()

def attempt(job, size, dice):
    '''Whether the job came to its end; if one rank is killed, so are the others.'''
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

seed, most, *folders = sys.argv[1:]
dice, most, kills = random.Random(int(seed)), int(most), 0
for layouts in folders:  # the jobs of one folder, each as SIZE:FILE
    jobs = [layout.split(":", 1) for layout in layouts.split(",")]
    while True:
        size, job = dice.choice(jobs)
        if attempt(job, int(size), dice):
            break
        kills += 1
        assert kills < 200
print("kills", kills)
"""


def killed(tiny: Setting, folders: list[Path], layouts: list[str], *, seed: int, most: int) -> int:
    """Scores into folders until each is whole; every attempt is in one of the layouts."""
    jobs = [
        ",".join(f"{LAYOUTS[name].world_size}:{job(tiny, folder, name)}" for name in layouts)
        for folder in folders
    ]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(seed), str(most), *jobs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def ends_in_the_same_files(tiny: Setting, num_folders: int, kills: int, layouts: list[str]) -> None:
    whole = tiny.root / f"whole_{kills}"
    killed(tiny, [whole], ["single"], seed=0, most=0)
    assert len(list(whole.glob("part-*"))) > 3
    broken = [tiny.root / f"broken_{kills}_{i}" for i in range(num_folders)]
    assert killed(tiny, broken, layouts, seed=1, most=30) >= kills
    for folder in broken:
        assert files(folder) == files(whole), folder


def test_killed_at_a_few_steps_it_ends_in_the_same_files(tiny: Setting) -> None:
    ends_in_the_same_files(tiny, 1, 1, ["single"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_sixty_steps_in_any_layout_it_ends_in_the_same_files(tiny: Setting) -> None:
    ends_in_the_same_files(tiny, 20, 60, ["single", "dp2", "pp2"])


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
