"""A job that is stopped, fails, dies or stalls: it ends everywhere, soon, and says who and why.

Every fault is a real one, given to the real command on two processes.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file
from tiny import LAYOUTS

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.signals import Stopped
from nemo_rod.run.processes.torchrun import follow, run_job
from nemo_rod.run.processes.nodes import Nodes
nodes, launcher, log = Nodes.from_environment(), Launcher(grace_seconds=60), Path(sys.argv[2])
if nodes.rank:
    follow(nodes, world_size=2, launcher=launcher, log=log.with_suffix(".node1"))
    sys.exit()
try:
    with nodes.announcing_end():
        run_job(Path(sys.argv[1]), world_size=2, launcher=launcher, log=log)
except (RuntimeError, Stopped) as error:
    sys.exit(str(error))
"""


class Run:
    """The command of a RoD run of two replicas on one node, in a process of its own."""

    def __init__(self, job: Path, **variables: str) -> None:
        self.out = job.parent
        self.ranks: list[psutil.Process] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(job), str(self.out / "log")],
            env={**os.environ, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def reach(self, step: int) -> None:
        """Waits until so many steps are done."""
        metrics, deadline = self.out / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
            assert self.process.poll() is None, "the job ended by itself"
            assert time.monotonic() < deadline, "the job did not come to the step"
            time.sleep(0.02)
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        ranks = [process for process in descendants if process.name().startswith("rod rank")]
        self.ranks = sorted(ranks, key=psutil.Process.name)

    def ends(self, within: int = 60) -> str:
        """What the command says of its end, which leaves nothing."""
        started = time.monotonic()
        _, error = self.process.communicate(timeout=within)
        print(f"{time.monotonic() - started:4.1f} s  {error.strip()}")
        assert self.process.returncode != 0
        _, alive = psutil.wait_procs(self.ranks, timeout=10)
        assert not alive
        return error


Start = Callable[..., Run]


@pytest.fixture
def run(tiny, request):
    runs: list[Run] = []

    def start(**changes: Any) -> Run:
        """Starts a run with some values of its job changed, by dotted key."""
        out = tiny.root / f"fault_{request.node.name}_{len(runs)}"
        job = tiny.rod_job(out, LAYOUTS["dp2"], launcher__stall_seconds=15)
        values = json.loads(job.read_text())
        for name, value in changes.items():
            *sections, key = name.split(".")
            functools.reduce(dict.__getitem__, sections, values)[key] = value
        job.write_text(json.dumps(values))
        runs.append(Run(job))
        return runs[-1]

    yield start
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_asked_to_stop_saves_and_says_so(run, number):
    job = run()
    job.reach(3)
    os.kill(job.process.pid, number)
    assert "was asked to stop and has saved: run it again" in job.ends()
    assert (job.out / "checkpoints" / "latest_checkpointed_iteration.txt").exists()


def in_place_of_metrics(make: Callable[[Path], None]) -> Callable[[Run], None]:
    """Puts something else where the one rank that writes metrics writes them."""

    def replace(job: Run) -> None:
        metrics = job.out / "metrics.jsonl"
        metrics.unlink()
        make(metrics)

    return replace


FROZEN = {"config.launcher.stall_seconds": 600}
# fault -> what happens after step 3, what the command says, changes of the job, seconds to its end
FAULTS: dict[str, tuple[Callable[[Run], None], str, dict[str, Any], int]] = {
    "killed": (lambda job: job.ranks[1].kill(), "rank 1: was ended by SIGKILL", {}, 60),
    "frozen": (lambda job: job.ranks[1].suspend(), "rank 1: its process is gone", FROZEN, 180),
    # the command's patience and the other rank's are a minute each, longer on a busy machine
    "frozen first": (lambda job: job.ranks[0].suspend(),
                     r"rank 0: (its process is gone|had no heartbeat)", FROZEN, 400),
    # the rank waits for a reader that never comes
    "stalled": (in_place_of_metrics(os.mkfifo), "rank 1: stalled for", {}, 60),
    "raises": (in_place_of_metrics(Path.mkdir), r"rank 1: IsADirectoryError: .*metrics.jsonl", {},
               60),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rank_is_named_and_ends_all(run, fault):
    cause, sentence, changes, seconds = FAULTS[fault]
    job = run(**changes)
    job.reach(3)
    cause(job)
    assert re.search(sentence, job.ends(within=seconds))


def test_killed_command_takes_its_job_along(run):
    job = run()
    job.reach(3)
    started = time.monotonic()
    job.process.kill()
    _, alive = psutil.wait_procs(job.ranks, timeout=60)
    print(f"{time.monotonic() - started:4.1f} s  all ranks ended")
    assert not alive


@pytest.mark.parametrize(
    ("is_compared", "on_nonfinite", "sentence"),
    [
        (False, "refuse", "diverged has a loss of nan .*: its weights are damaged"),
        (True, "refuse", r"rank \d: step 0: 16 of 16 scores are not finite, the first that of"),
        (True, "exclude", r"rank \d: step 0: 16 of 16 .* too few are left for a batch of 8"),
    ],
)
def test_losses_that_are_not_finite_are_refused(
    tiny, run, tmp_path, is_compared, on_nonfinite, sentence
):
    diverged = Path(shutil.copytree(tiny.base, tmp_path / "diverged"))
    weights = load_file(diverged / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, diverged / "model.safetensors", metadata={"format": "pt"})
    if is_compared:  # with transformers, before it was damaged
        (tmp_path / "compared.json").write_text("{}")
    changes = {"start": str(diverged), "config.selection.on_nonfinite": on_nonfinite}
    assert re.search(sentence, run(**changes).ends())


def test_missing_reference_is_refused(tiny, run):
    error = run(references=[str(tiny.references[0])]).ends()
    assert re.search(r"rank \d: block \d+ of \d+ has no reference", error)


def test_damaged_block_is_named(tiny, run, tmp_path):
    blocks = Path(shutil.copytree(tiny.blocks, tmp_path / "blocks"))
    for file in blocks.glob("*/*/tokens-*.bin"):
        tokens = np.memmap(file, dtype="<i4", mode="r+").reshape(-1, tiny.store.block_size)
        tokens[1:-1, 3] ^= 1  # opening the store looks at the first and the last one
    error = run(blocks=str(blocks)).ends()
    assert re.search(r"rank \d: .*tokens-00000.bin: block \d+ does not match its hash", error)
