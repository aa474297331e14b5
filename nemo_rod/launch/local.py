"""Runs a job's processes on this machine with torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rod.config import Launcher
from nemo_rod.jobs import end_with_parent
from nemo_rod.progress import PREFIX

ERROR = re.compile(r"nemo-rod error on rank (\d+): (.*)")


def run_job(job_file: Path, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs `python -m nemo_rod.megatron JOB` on `world_size` processes and waits.

    Args:
        job_file: the job, as `write_job` wrote it.
        world_size: number of processes.
        launcher: threads of each process.
        log: gets everything the processes print.

    Raises:
        ValueError: if the job refused its input; the sentence of the rank that did.
        RuntimeError: if the job failed otherwise; names the log.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(launcher.threads), "PYTHONUNBUFFERED": "1"}
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        process = subprocess.Popen(
            torchrun(job_file, world_size),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent,
        )
        with _ending(process):
            refusal = _follow(process, file)
    if process.returncode == 0:
        return
    if refusal:
        raise ValueError(refusal)
    raise RuntimeError(f"The job failed (exit status {process.returncode}): see {log}.")


def torchrun(job_file: Path, world_size: int) -> list[str]:
    """The command line of a job."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={world_size}", "-m", "nemo_rod.megatron", str(job_file)),
    ]


def _follow(process: subprocess.Popen, log: object) -> str | None:
    """Copies the output to the log, shows progress, returns the first refusal."""
    refusal = None
    assert process.stdout is not None
    on_terminal = sys.stderr.isatty()
    for line in process.stdout:
        log.write(line)  # type: ignore[attr-defined]
        log.flush()  # type: ignore[attr-defined]
        if line.startswith(PREFIX):
            text = line.removeprefix(PREFIX).rstrip()
            # a terminal keeps one line up to date, a log gets one line after another
            print(
                f"\r\033[K  {text}" if on_terminal else f"  {text}",
                end="" if on_terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif (match := ERROR.search(line)) and refusal is None:
            refusal = match[2].strip()
    if on_terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    process.wait()
    return refusal


@contextmanager
def _ending(process: subprocess.Popen) -> Iterator[None]:
    """Passes signals on to the job, and leaves no process behind."""

    def forward(number: int, _: object) -> None:
        process.send_signal(number)

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
