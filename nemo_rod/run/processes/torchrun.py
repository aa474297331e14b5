"""Runs a job's processes on this machine, or on the nodes of this Slurm job, with torchrun."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from nemo_rod.config import Launcher
from nemo_rod.progress import PREFIX
from nemo_rod.run.processes.nodes import Ending, Nodes, Order
from nemo_rod.run.processes.pythons import python_with_megatron
from nemo_rod.run.processes.start import Running, sees_gpu, start_program, start_torchrun
from nemo_rod.signals import STOP_SIGNALS, HeartbeatFile, Stopped

# The final message of a job, and torchrun's about a process that left none.
ERROR = re.compile(r"nemo-rod error on (rank \d+|all ranks): (.*)")
STOPPED = re.compile(r"nemo-rod stopped: (.*)")
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
# Grace period for ranks to notice that another node's are gone, before they are terminated.
_ALONE_SECONDS = 60.0
_SHARED_SECONDS = 30.0  # for a file to appear on all nodes; network file systems may be late


def run_job(job_file: Path, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs `python -m nemo_rod.megatron JOB` on `world_size` processes and waits for them.

    Args:
        job_file: file written by `write_job`.
        world_size: number of processes over all nodes.
        launcher: threads per process, and the grace period for stopping.
        log: receives all output of the processes; other nodes write beside it.

    Raises:
        Stopped: if the job stopped on request; it has saved.
        RuntimeError: if the job failed, with the rank and the reason.
    """
    nodes = Nodes.of_this_job()
    start = nodes.start(Order(str(job_file), str(log), world_size, free_port()))
    endings = [run_torchrun(start.order, nodes, launcher, start.has_failed_elsewhere)]
    endings += start.wait_elsewhere(launcher.grace_seconds)
    refuse_bad_ending(endings, log)


def run_torchrun(
    order: Order, nodes: Nodes, launcher: Launcher, is_alone: Callable[[], bool] = lambda: False
) -> Ending:
    """Runs the processes of this node and waits for them, as `run_process` does."""
    log = Path(order.log)
    if nodes.rank:
        deadline = time.monotonic() + _SHARED_SECONDS
        while not Path(order.job_file).is_file():
            if time.monotonic() > deadline:
                return {
                    "error": f"node {socket.gethostname()} does not see {order.job_file}, which "
                    "the first node has written: put run_dir on a file system that all nodes share"
                }
            time.sleep(0.5)
        log = log.with_name(f"{log.stem}.node{nodes.rank}{log.suffix}")
    first_rank = nodes.rank * (order.world_size // nodes.count)
    command = torchrun(order, nodes)
    forks = nodes.count == 1 and not sees_gpu() and command[0] == sys.executable
    start = start_torchrun if forks else start_program
    ending = run_process(command, log, launcher, is_alone, first_rank, start)
    if set(ending) == {"ended"}:
        ending["ended"] = f"node {nodes.rank}: {ending['ended']}"
    return ending


def run_process(
    command: list[str],
    log: Path,
    launcher: Launcher,
    is_alone: Callable[[], bool] = lambda: False,
    first_rank: int = 0,
    start: Callable[[list[str], dict[str, str]], Running] = start_program,
) -> Ending:
    """Runs a command with its output in a log, shows its progress, and waits for it.

    Args:
        command: the program and its arguments.
        log: file to append to.
        launcher: threads per process, and the grace period for stopping.
        is_alone: whether another node's processes have failed; polled, and once it is true, the
            command is terminated after a grace period.
        first_rank: rank of its first process.
        start: starts a command with an environment; a new program by default.

    Returns:
        Messages about the end, by kind; empty on success.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(launcher.threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launcher.grace_seconds),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    ending: Ending = {}
    with open(log, "a") as file, tempfile.TemporaryDirectory() as folder:
        env["PET_LOG_DIR"] = folder  # torchrun's, which it would leave behind elsewhere
        heartbeat = HeartbeatFile(Path(folder) / "rank-0")
        env[HeartbeatFile.variable] = str(heartbeat.path)
        process = start(command, env)
        with _forwarded_signals(process) as signals:
            # in a thread of its own: a process that outlives the job may keep the pipe open
            reader = threading.Thread(
                target=_follow, args=(process, file, ending, first_rank), daemon=True
            )
            reader.start()
            _wait(process, is_alone, heartbeat, ending)
            reader.join(timeout=10)
    if process.returncode == 0:
        return {}
    ending = ending or {"ended": f"exit status {process.returncode}"}
    if signals and "stopped" not in ending:  # still starting, or a job that never saves
        cause = ending.get("killed") or ending.get("error") or ending["ended"]
        ending["stopped"] = f"it was asked to stop, and ended ({cause}): run it again to resume"
    return ending


def refuse_bad_ending(endings: list[Ending], log: Path) -> None:
    """Raises as `run_job`, unless a job's processes ended well."""
    # a saved job is safe, despite other messages; a killed rank causes the messages of the others
    for kind in ("stopped", "killed", "error", "ended"):
        for ending in endings:
            if kind in ending:
                sentence = f"{ending[kind]} (log: {log})"
                raise Stopped(sentence) if kind == "stopped" else RuntimeError(sentence)


def torchrun(order: Order, nodes: Nodes) -> list[str]:
    """Returns the command line of a job on this node."""
    if nodes.count == 1:
        meet = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        meet = [f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}"]
        meet += [f"--master-addr={nodes.host}", f"--master-port={order.port}"]
    return [
        *(python_with_megatron(), "-m", "torch.distributed.run", *meet),
        *(f"--nproc-per-node={order.world_size // nodes.count}", "-m", "nemo_rod.megatron"),
        order.job_file,
    ]


def free_port() -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _wait(
    process: Running, is_alone: Callable[[], bool], heartbeat: HeartbeatFile, ending: Ending
) -> None:
    """Waits for the end, and enforces it if rank 0 is frozen or other nodes' processes are gone."""
    alone_since = None
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        if heartbeat.kill_if_frozen():
            ending.setdefault("killed", f"rank 0: had no heartbeat for {heartbeat.patience} s")
        if alone_since is None and is_alone():
            alone_since = time.monotonic()
        if alone_since is not None and time.monotonic() - alone_since > _ALONE_SECONDS:
            process.terminate()
            process.wait()


def _follow(process: Running, log: TextIO, ending: Ending, first_rank: int) -> None:
    """Copies the output to the log, shows progress, and records messages about the end."""
    assert process.stdout is not None
    on_terminal = sys.stderr.isatty()  # progress is one line there, which is updated
    start, end = ("\r\033[K  ", "") if on_terminal else ("  ", "\n")
    for line in process.stdout:
        log.write(line)
        log.flush()
        if line.startswith(PREFIX):
            text = line.removeprefix(PREFIX).rstrip()
            print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
        elif match := ERROR.search(line):
            ending.setdefault("error", f"{match[1]}: {match[2].strip()}")
        elif match := STOPPED.search(line):
            ending.setdefault("stopped", match[1].strip())
        elif match := KILLED.search(line):
            name = signal.Signals(int(match[1])).name
            rank = first_rank + int(match[2])
            ending.setdefault("killed", f"rank {rank}: was ended by {name}")
    if on_terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _forwarded_signals(process: Running) -> Iterator[list[int]]:
    """Forwards stop signals to the job, so that it saves, and leaves no process behind.

    Yields:
        Numbers of the received signals.
    """
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        process.terminate()

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if process.poll() is None:  # torchrun ends its ranks when terminated
            process.terminate()
            process.wait()
