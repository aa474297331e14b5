"""Runs a job's processes on this machine, or on the nodes of this Slurm job, with torchrun."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from nemo_rod.config import Launcher
from nemo_rod.processes.nodes import Ending, Nodes, Order
from nemo_rod.processes.signals import STOP_SIGNALS, Stopped, end_with_parent
from nemo_rod.progress import PREFIX

# What a job says of its end, and what torchrun says of a process that could not say anything.
ERROR = re.compile(r"nemo-rod error on (rank \d+|all ranks): (.*)")
STOPPED = re.compile(r"nemo-rod stopped: (.*)")
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
# Time for the ranks of one node to find out that another node's are gone, before they are ended.
_ALONE_SECONDS = 60.0


def run_job(job_file: Path, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs `python -m nemo_rod.megatron JOB` on `world_size` processes and waits.

    Args:
        job_file: the job, as `write_job` wrote it.
        world_size: number of processes, on all nodes together.
        launcher: threads of each process, and the time it has to stop.
        log: gets everything the processes print; other nodes write beside it.

    Raises:
        Stopped: if the job was asked to stop; it has saved.
        RuntimeError: if the job failed: which rank, and why.
    """
    nodes = Nodes.of_this_job()
    start = nodes.start(Order(str(job_file), str(log), world_size, free_port()))
    endings = [run_torchrun(start.order, nodes, launcher, start.has_failed_elsewhere)]
    endings += start.wait_elsewhere(launcher.grace_seconds)
    refuse_bad_ending(endings, log)


def run_torchrun(
    order: Order, nodes: Nodes, launcher: Launcher, is_alone: Callable[[], bool] = lambda: False
) -> Ending:
    """Runs the processes of this node and waits.

    Args:
        order: the job.
        nodes: that it runs on.
        launcher: threads of each process, and the time it has to stop.
        is_alone: whether another node's processes have failed; then these are ended, too, unless
            they end by themselves.

    Returns:
        Nothing if they ended well. Else what they said of their end, by kind.
    """
    log = Path(order.log)
    if nodes.rank:
        log = log.with_name(f"{log.stem}.node{nodes.rank}{log.suffix}")
    first_rank = nodes.rank * (order.world_size // nodes.count)
    said = run_process(torchrun(order, nodes), log, launcher, is_alone, first_rank)
    if set(said) == {"ended"}:
        said["ended"] = f"node {nodes.rank}: {said['ended']}"
    return said


def run_process(
    command: list[str],
    log: Path,
    launcher: Launcher,
    is_alone: Callable[[], bool] = lambda: False,
    first_rank: int = 0,
) -> Ending:
    """Runs a command whose output goes to a log, shows its progress, and waits.

    Args:
        command: the program and its arguments.
        log: is added to.
        launcher: threads of each process, and the time it has to stop.
        is_alone: asked now and then; once it is true, the command is ended.
        first_rank: of its processes.

    Returns:
        Nothing if it ended well. Else what it said of its end, by kind.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(launcher.threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launcher.grace_seconds),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    said: Ending = {}
    with open(log, "a") as file:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to us alone, and we ask the job to stop
            preexec_fn=_before_torchrun,
        )
        with _ending(process) as asked:
            # not in this thread: a process that outlives the job may keep the pipe open
            reader = threading.Thread(
                target=_follow, args=(process, file, said, first_rank), daemon=True
            )
            reader.start()
            _wait(process, is_alone)
            reader.join(timeout=10)
    if process.returncode == 0:
        return {}
    said = said or {"ended": f"exit status {process.returncode}"}
    if asked and "stopped" not in said:  # it was only starting, or its kind of job never saves
        how = said.get("killed") or said.get("error") or said["ended"]
        said["stopped"] = f"it was asked to stop, and ended ({how}): run it again to go on"
    return said


def refuse_bad_ending(endings: list[Ending], log: Path) -> None:
    """Raises what a job's processes said of their end, if they did not end well.

    Raises:
        Stopped: if the job was asked to stop; it has saved.
        RuntimeError: if the job failed: which rank, and why.
    """
    # A job that saved is safe, whatever else was said; a rank that was killed is the cause of what
    # the others say.
    for kind in ("stopped", "killed", "error", "ended"):
        for ending in endings:
            if kind in ending:
                sentence = f"{ending[kind]} (log: {log})"
                raise Stopped(sentence) if kind == "stopped" else RuntimeError(sentence)


def torchrun(order: Order, nodes: Nodes) -> list[str]:
    """The command line of a job on this node."""
    if nodes.count == 1:
        meet = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        meet = [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}"]
        meet += [f"--master-addr={nodes.host}", f"--master-port={order.port}"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *meet),
        *(f"--nproc-per-node={order.world_size // nodes.count}", "-m", "nemo_rod.megatron"),
        order.job_file,
    ]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _before_torchrun() -> None:
    end_with_parent()
    # Slurm sends the signal that announces a time limit to every process. The ranks answer it;
    # torchrun would die of it and take their store along.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _wait(process: subprocess.Popen, is_alone: Callable[[], bool]) -> None:
    """Waits for the end, and brings it about when the other nodes' processes are gone."""
    alone_since = None
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        if alone_since is None and is_alone():
            alone_since = time.monotonic()
        if alone_since is not None and time.monotonic() - alone_since > _ALONE_SECONDS:
            process.terminate()
            process.wait()


def _follow(process: subprocess.Popen[str], log: TextIO, said: Ending, first_rank: int) -> None:
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
            rank = first_rank + int(match[2])
            said.setdefault("killed", f"rank {rank}: was ended by {name}")
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """A terminal keeps one line up to date; elsewhere one line follows another."""
    on_terminal = sys.stderr.isatty()
    start, end = ("\r\033[K  ", "") if on_terminal else ("  ", "\n")
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


@contextmanager
def _ending(process: subprocess.Popen) -> Iterator[list[int]]:
    """Asks the job to save and stop when we are told to end, and leaves no process behind.

    Yields:
        The signals that told us.
    """
    asked: list[int] = []

    def forward(number: int, _: object) -> None:
        asked.append(number)
        process.terminate()

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process.poll() is None:  # torchrun ends its ranks when it is told to end
            process.terminate()
            process.wait()
