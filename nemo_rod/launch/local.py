"""Runs a job's processes on this machine with torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from nemo_rod.config import Launcher
from nemo_rod.jobs import end_with_parent
from nemo_rod.progress import PREFIX

# What a job says of its end, and what torchrun says of a process that could not say anything.
ERROR = re.compile(r"nemo-rod error on (rank \d+|all ranks): (.*)")
STOPPED = re.compile(r"nemo-rod stopped: (.*)")
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")


def run_job(job_file: Path, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs `python -m nemo_rod.megatron JOB` on `world_size` processes and waits.

    Args:
        job_file: the job, as `write_job` wrote it.
        world_size: number of processes.
        launcher: threads of each process.
        log: gets everything the processes print.

    Raises:
        RuntimeError: if the job did not end well: which rank failed and why, or that it was asked
            to stop.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(launcher.threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launcher.grace_seconds),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        process = subprocess.Popen(
            torchrun(job_file, world_size),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to us alone, and we ask the job to stop
            preexec_fn=end_with_parent,
        )
        with _ending(process):
            said: dict[str, str] = {}
            # not in this thread: a process that outlives the job may keep the pipe open
            reader = threading.Thread(target=_follow, args=(process, file, said), daemon=True)
            reader.start()
            process.wait()
            reader.join(timeout=10)
    # A rank that was killed is the cause of what the others say.
    ending = said.get("stopped") or said.get("killed") or said.get("error")
    if process.returncode != 0:
        raise RuntimeError(f"{ending or f'exit status {process.returncode}'} (log: {log})")


def torchrun(job_file: Path, world_size: int) -> list[str]:
    """The command line of a job."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={world_size}", "-m", "nemo_rod.megatron", str(job_file)),
    ]


def _follow(process: subprocess.Popen[str], log: TextIO, said: dict[str, str]) -> None:
    """Copies the output to the log, shows progress, and notes what the job says of its end."""
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        log.flush()
        if line.startswith(PREFIX):
            _show(line.removeprefix(PREFIX).rstrip())
        elif match := ERROR.search(line):
            said.setdefault("error", f"{match[1]}: {match[2].strip()}")
        elif match := STOPPED.search(line):
            said.setdefault("stopped", match[1].strip())
        elif match := KILLED.search(line):
            name = signal.Signals(int(match[1])).name
            said.setdefault("killed", f"rank {match[2]}: was ended by {name}")
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """A terminal keeps one line up to date; elsewhere one line follows another."""
    on_terminal = sys.stderr.isatty()
    start, end = ("\r\033[K  ", "") if on_terminal else ("  ", "\n")
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


@contextmanager
def _ending(process: subprocess.Popen) -> Iterator[None]:
    """Asks the job to save and stop when we are told to end, and leaves no process behind."""

    def forward(number: int, _: object) -> None:
        process.terminate()

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process.poll() is None:  # torchrun ends its ranks when it is told to end
            process.terminate()
            process.wait()
