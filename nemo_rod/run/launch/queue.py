"""Slurm's view of the jobs of a run.

A job is the run's if its output goes to the run's logs. A number alone does not identify it: a copy
of a run folder has the same numbers, and a new cluster counts from the start.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemo_rod.files import by_launch, read_bytes


@dataclass(frozen=True)
class QueuedJob:
    """State of one job in Slurm."""

    state: str  # Slurm's name, such as PENDING, RUNNING, FAILED or TIMEOUT
    nodes: str = ""  # those on which it runs or ran; empty if none yet
    reason: str = ""  # why it is pending
    alive: bool = False  # whether it is in the queue, pending or running


def slurm_logs(run_dir: Path) -> Path:
    """Returns the folder of the output of a run's jobs."""
    return run_dir.absolute() / "logs" / "slurm"


@dataclass(frozen=True)
class SubmittedJob:
    """A line of a launch's `jobs.tsv`: the stage of a job, and the launcher that submitted it."""

    stage: str
    launcher: str


def read_jobs(run_dir: Path) -> dict[str, SubmittedJob]:
    """Reads the stage of each job, as recorded by `submit.sh`, the latest launch last.

    Returns:
        Jobs by number, as sbatch printed it: 101, or 101;name on one of several clusters.

    Raises:
        ValueError: a line is damaged.
    """
    jobs = {}
    for file in by_launch(run_dir, "jobs.tsv"):
        for line in read_bytes(file, 1 << 20).decode(errors="replace").splitlines():
            stage, _, number = line.partition("\t")
            if not re.fullmatch(r"\d+(;[\w.-]+)?", number):
                raise ValueError(
                    f"{file} has the line {line[:80]!r}, expected a stage and its job's number: "
                    "correct it by squeue's list, or remove it if there is no such job."
                )
            jobs[number] = SubmittedJob(stage, file.parent.name)
    return jobs


def alive(run_dir: Path) -> dict[str, QueuedJob]:
    """Returns the jobs of all launches of a run that are pending or running, by number.

    Raises:
        ValueError: squeue does not respond.
    """
    own, _ = in_queue(run_dir, read_jobs(run_dir))
    return own


def in_queue(run_dir: Path, numbers: Iterable[str]) -> tuple[dict[str, QueuedJob], set[str]]:
    """Returns the run's jobs in the queue, and its recorded numbers that now belong to others."""
    own: dict[str, QueuedJob] = {}
    others = set()
    for cluster, full in by_cluster(numbers).items():
        states = _squeue(run_dir, *cluster, "--format=%i|%T|%N|%r")
        logs = _squeue(run_dir, *cluster, "--Format=jobarrayid:24,stdout:4096")
        log_of = {number: log for number, _, log in (line.partition(" ") for line in logs)}
        for line in states:
            short, *facts = line.split("|")
            if short not in full or short not in log_of:
                continue  # the name of a cluster, not in the run's records, or just ended
            state, nodes, reason = facts
            folder = os.path.dirname(log_of[short].strip())
            # a link in the run's folder may lead to the logs of another run
            if os.path.realpath(folder) == str(slurm_logs(run_dir.resolve())):
                own[full[short]] = QueuedJob(state, nodes, reason, alive=True)
            else:
                others.add(full[short])
    return own, others


def by_cluster(numbers: Iterable[str]) -> dict[tuple[str, ...], dict[str, str]]:
    """Groups job numbers by cluster.

    Jobs of one run are on one cluster, unless its launches went to several.

    Returns:
        Options that select a cluster -> number without its name -> full number.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for number in numbers:
        short, _, cluster = number.partition(";")
        options = (f"--clusters={cluster}",) if cluster else ()
        groups.setdefault(options, {})[short] = number
    return groups


def _squeue(run_dir: Path, *options: str) -> list[str]:
    lines = ask("squeue", "--me", "--noheader", *options)
    if isinstance(lines, str):
        raise ValueError(
            f"Slurm does not list the jobs of {run_dir} in the queue ({lines}): run it again where "
            f"squeue responds, or remove {run_dir}/launch/*/jobs.tsv if all of them have ended."
        )
    return lines


def ask(*command: str) -> list[str] | str:
    """Returns the output lines of a program of Slurm's, or the reason for its failure.

    Filters and formats that its user has in the environment would hide jobs, or spare them.
    """
    own = re.compile("S(QUEUE|CANCEL|ACCT)_|SLURM_TIME_FORMAT")
    environment = {name: value for name, value in os.environ.items() if not own.match(name)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    except FileNotFoundError:
        return f"{command[0]} is not on this machine"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not respond in 60 s"
    if done.returncode:
        return f"{command[0]}: {done.stderr.strip() or f'exit status {done.returncode}'}"
    return done.stdout.splitlines()
