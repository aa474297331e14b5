"""Stages killed at random moments under a real Slurm: what they end in is the same, to the byte.

`make test-kills` starts the Slurm on loopback. A recipe runs once without a kill, on one process
and on two; then again, stage after stage, each a job of its own, on one node and on two. Each job
is killed a number of times: its command, one of its ranks, or all of it. SIGKILL leaves nobody a
moment to save. A killed job fails, and the same command submits it again.
"""

import hashlib
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from slurm_chain import ON_SLURM, RECIPE, nemo_rod
from slurm_cluster import Cluster, processes_of, wait_for

pytestmark = pytest.mark.kills

# Every stage with its command, in order, and how often it is killed.
STAGES = {
    "prepare": (["prepare"], 5), "base": (["pretrain"], 5),
    "references_base": (["reference", "arm=base"], 5), "no_replay": (["train", "arm=no_replay"], 7),
    "references_specialist": (["reference", "arm=no_replay"], 5), "rod": (["train", "arm=rod"], 7),
    "merge_0.6": (["merge", "arm=merge_0.6"], 5), "evaluate": (["evaluate"], 5),
    "report": (["report"], 5),
}  # fmt: skip
# Of what a run leaves, these have times of day, durations or paths in them.
DIFFERS = ("metrics.jsonl", "arm.json", "job.json")


@pytest.fixture(scope="module", params=("single", "dp2"))
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def whole(layout, tmp_path_factory):
    """The run that nobody killed, on this machine without Slurm, and the seconds of each stage."""
    run_dir, seconds = tmp_path_factory.mktemp(f"whole_{layout}"), {}
    for stage, (command, _) in STAGES.items():
        began = time.monotonic()
        nemo_rod(*words(command, layout, run_dir))
        seconds[stage] = time.monotonic() - began
    return run_dir, seconds


@pytest.fixture(scope="module")
def killed(layout, whole, cluster, tmp_path_factory):
    """The run whose stages were killed, and how often each of them was while it worked."""
    run_dir, counts = tmp_path_factory.mktemp(f"killed_{layout}"), dict.fromkeys(STAGES, 0)
    before = {*Path(os.environ["TMPDIR"]).iterdir()}
    dice = random.Random(f"kills {layout}")
    for stage, (command, required) in STAGES.items():
        while not is_done(run_dir, stage) or counts[stage] < required:
            if is_done(run_dir, stage):  # it ended before the kill
                take_back(run_dir, stage)
            options = [*words(command, layout, run_dir), *ON_SLURM, "launcher.requeues=0"]
            number, hits = nemo_rod(*options, cluster=cluster).split()[0], 0
            if counts[stage] < required:
                moment = dice.uniform(0.2, 1.1) * whole[1][stage]
                hits = kill(number, moment, dice.choice(("command", "rank", "all")), cluster)
                counts[stage] += hits
                print(f"{layout} {stage}: killed {counts[stage]} times", flush=True)
            cluster.wait(1800, number)
            log = run_dir / "logs" / "slurm" / f"{stage}.out"
            assert hits or is_done(run_dir, stage), f"it cannot resume: {log.read_text()[-2000:]}"
    for folder in {*Path(os.environ["TMPDIR"]).glob("tmp*")} - before:  # SIGKILL left them
        shutil.rmtree(folder)
    return run_dir, counts


def words(command: list[str], layout: str, run_dir: Path) -> list[str]:
    own = [f"parallel={layout}", "train.steps=120", "checkpoint.every=10"]
    return [*command, *RECIPE, *own, f"run_dir={run_dir}"]


def proof(run_dir: Path, stage: str) -> Path:
    """The file that tells that a stage is done."""
    proofs = {
        "prepare": "blocks/manifest.json",
        "base": "base/manifest.json",
        "references_base": "references/base/manifest.json",
        "references_specialist": "references/specialist/manifest.json",
        "evaluate": "arms/merge_0.6/evaluation.json",
        "report": "report/index.html",
    }
    return run_dir / proofs.get(stage, f"arms/{stage}/manifest.json")


def is_done(run_dir: Path, stage: str) -> bool:
    return proof(run_dir, stage).exists()


def take_back(run_dir: Path, stage: str) -> None:
    """Removes what a stage has made, so that it has to do its work again."""
    if stage == "evaluate":
        for file in run_dir.glob("arms/*/evaluation.json"):
            file.unlink()
    else:
        shutil.rmtree(proof(run_dir, stage).parent)


def kill(number: str, moment: float, victim: str, cluster: Cluster) -> int:
    """Kills processes of a job some time after its command has begun; returns 1 if any was left."""
    wait_for(lambda: bool(processes(number)) or not cluster.is_queued(number), 600, "no job began")
    time.sleep(moment)
    running = processes(number)
    ranks = [process for process in running if process["name"].startswith("rod rank")]
    commands = [process for process in running if "nemo_rod.cli" in process["cmdline"]]
    chosen = {"all": running, "rank": ranks[-1:] or commands, "command": commands}[victim]
    for process in chosen:
        with suppress(ProcessLookupError):
            os.kill(process["pid"], signal.SIGKILL)
    return int(bool(chosen))


def processes(number: str) -> list[dict[str, Any]]:
    """Processes of a Slurm job that run nemo_rod."""
    return [
        process
        for process in processes_of(number)
        if "-m" in process["cmdline"] or process["name"].startswith(("pt_elastic", "rod rank"))
    ]


def digests(run_dir: Path) -> dict[str, str]:
    """The content of every file that a run makes, but those with times in them."""
    kept = [run_dir / name for name in ("blocks", "base", "references", "arms", "report/tables")]
    files = [file for folder in kept for file in sorted(folder.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(run_dir)): hashlib.sha256(content(file)).hexdigest()
        for file in files
        if file.name not in DIFFERS and "checkpoints" not in file.parts
    }


def content(file: Path) -> bytes:
    """The content of a file, without the column of wall times in the table of arms."""
    if file.name != "arms.md":
        return file.read_bytes()
    rows = [line.split("|") for line in file.read_text().splitlines()]
    (times,) = (place for place, name in enumerate(rows[0]) if name.strip() == "Wall time (s)")
    return "\n".join(str(row[:times] + row[times + 1 :]) for row in rows).encode()


def test_every_stage_was_killed(killed):
    assert killed[1] == {stage: number for stage, (_, number) in STAGES.items()}


def test_killed_runs_end_in_the_same_bytes(whole, killed):
    one, other = digests(whole[0]), digests(killed[0])
    lost = sorted(one.keys() ^ other.keys())
    assert not lost, f"files that only one of the runs has: {lost}"
    assert {name for name in one if one[name] != other[name]} == set()
    assert any(name.endswith("curriculum.rod") for name in one)
    assert any(name.endswith("model.safetensors") for name in one)
