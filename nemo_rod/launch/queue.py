"""Slurm's view of the jobs of a launch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class QueuedJob:
    """State of one job in Slurm.

    Attributes:
        state: Slurm's state name, such as PENDING, RUNNING, FAILED or TIMEOUT.
        nodes: nodes on which it runs or ran; empty if none yet.
        reason: why it is pending.
        left: time until its limit, in Slurm's notation.
        alive: whether it is in the queue, pending or running.
    """

    state: str
    nodes: str = ""
    reason: str = ""
    left: str = ""
    alive: bool = False


def read_jobs(folder: Path) -> dict[str, str]:
    """Reads job numbers by stage, as recorded by `submit.sh`; empty if nothing was submitted."""
    path = folder / "jobs.tsv"
    if not path.exists():
        return {}
    lines = (line.split("\t") for line in path.read_text().splitlines())
    return {name: number for name, number in lines}


def look(numbers: Iterable[str]) -> dict[str, QueuedJob]:
    """Queries squeue, then for jobs that it no longer lists sacct, then the controller.

    Args:
        numbers: job numbers.

    Returns:
        Jobs by number, without those that Slurm has forgotten.
    """
    wanted = set(numbers)
    if not wanted:
        return {}
    found = {}
    for line in _ask("squeue", "--me", "--noheader", "--format=%i|%T|%N|%r|%L"):
        number, state, nodes, reason, left = line.split("|")
        if number in wanted:
            found[number] = QueuedJob(state, nodes, reason, left, alive=True)
    if missing := sorted(wanted - set(found)):
        found |= _from_accounting(missing) or _from_controller(missing)
    return found


def alive(numbers: Iterable[str]) -> list[str]:
    """Returns those of the jobs that are pending or running."""
    found = look(numbers)
    return sorted(number for number, job in found.items() if job.alive)


def cancel(numbers: Iterable[str]) -> None:
    """Cancels jobs; running ones are asked to stop first."""
    subprocess.run(["scancel", *numbers], check=True)


def _from_accounting(numbers: list[str]) -> dict[str, QueuedJob]:
    command = ["sacct", "--noheader", "--parsable2", "--allocations"]
    lines = _ask(*command, f"--jobs={','.join(numbers)}", "--format=JobID,State,NodeList")
    rows = (line.split("|") for line in lines)
    # the state of a cancelled job is "CANCELLED by 1000"
    return {number: QueuedJob(state.split()[0], nodes) for number, state, nodes in rows}


def _from_controller(numbers: list[str]) -> dict[str, QueuedJob]:
    found = {}
    for number in numbers:
        for line in _ask("scontrol", "show", "job", "--oneliner", number):
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            nodes = fields.get("NodeList", "").replace("(null)", "")
            found[number] = QueuedJob(fields["JobState"], nodes)
    return found


def _ask(*command: str) -> list[str]:
    """Returns the lines of an answer; none if the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
