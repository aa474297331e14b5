"""Scoring that was killed, at any moment and again and again, ends in the files of a whole run.

A real job each time: the real model, store and parts. The processes of all attempts are forked from
one that has torch and Megatron loaded already.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from places import WORKERS
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


def killed(tiny: Setting, folders: list[Path], layouts: list[str], *, seed: int, most: int) -> int:
    """Scores into folders until each is whole; every attempt is in one of the layouts."""
    jobs = [
        ",".join(f"{LAYOUTS[name].world_size}:{job(tiny, folder, name)}" for name in layouts)
        for folder in folders
    ]
    (output,) = tiny.torchrun(1, WORKERS / "killed_worker.py", seed, most, *jobs, timeout=900)
    (kills,) = re.findall(r"^kills (\d+)$", output, re.MULTILINE)
    return int(kills)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_any_step_it_ends_in_the_same_files(tiny):
    whole = tiny.root / "whole"
    killed(tiny, [whole], ["single"], seed=0, most=0)
    assert len(list(whole.glob("part-*"))) > 3
    broken = [tiny.root / f"broken_{i}" for i in range(8)]
    assert killed(tiny, broken, ["single", "dp2", "pp2"], seed=1, most=30) >= 60
    for folder in broken:
        assert files(folder) == files(whole), folder


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2"])
def test_references_are_the_same_in_every_layout(tiny, layout):
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
