"""Runs a job's processes on this machine, or on the nodes of this Slurm job, with torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nemo_rod import parts
from nemo_rod.config import Launcher
from nemo_rod.files import open_file, read_bytes, write_whole
from nemo_rod.progress import PREFIX
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.processes.pythons import python_with_megatron, sees_gpu
from nemo_rod.signals import (
    KEPT_OPEN,
    STOP_SIGNALS,
    HeartbeatFile,
    Stopped,
    end_with_parent,
    kill_tree,
)

# How processes ended: messages by kind; empty on success.
Ending = dict[str, str]
Running = subprocess.Popen[str]

# The final message of a job, and torchrun's about a process that left none.
ERROR = re.compile(r"nemo-rod error on (rank \d+|all ranks): (.*)")
STOPPED = re.compile(r"nemo-rod stopped: (.*)")
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")
RANK = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)")  # later, in its report


def run_job(job_file: Path, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs `python -m nemo_rod.megatron JOB` on `world_size` processes and waits for them.

    Args:
        job_file: file written by `write_job`.
        world_size: number of processes over all nodes.
        launcher: threads and binding of processes, and the grace period for stopping.
        log: receives all output of the processes, in the folder of logs of the run; other nodes
            write beside it.

    Raises:
        Stopped: the job stopped on request; it has saved.
        RuntimeError: the job failed, with the rank and the reason.
    """
    nodes = Nodes.from_environment()
    command = [*torchrun(nodes, world_size, launcher), str(job_file)]
    with tuned_kernels(log.parent.parent / "kernels", keep=True) as kernels:
        variables = nodes.environment() | kernels
        ending = run_process(command, log, launcher, variables=variables)
    refuse_bad_ending(ending, log)


def follow(nodes: Nodes, *, world_size: int, launcher: Launcher, log: Path) -> None:
    """Runs this node's processes of the first node's job, if it starts one, until it is over.

    Raises:
        RuntimeError: the processes failed and the first node's command does not end.
    """
    if not nodes.wait_for_start():
        return
    command = torchrun(nodes, world_size, launcher)
    with tuned_kernels(log.parent.parent / "kernels", keep=False) as kernels:
        variables = nodes.environment() | kernels
        ending = run_process(command, log, launcher, is_over=nodes.is_over, variables=variables)
    if not ending:
        return
    cause = ending.get("killed") or ending.get("error") or ending.get("ended", "")
    if "stopped" not in ending:
        nodes.declare(cause if cause.startswith("rank ") else f"node {nodes.rank}: {cause}")
    # if this command failed, Slurm would kill the first one, which still records its end
    if not nodes.wait_for_end(launcher.grace_seconds):
        raise RuntimeError(f"node {nodes.rank}: {cause or ending['stopped']} (log: {log})")


def run_process(
    command: list[str],
    log: Path,
    launcher: Launcher,
    is_over: Callable[[], bool] = lambda: False,
    variables: Mapping[str, str] | None = None,
) -> Ending:
    """Runs a command with its output in a log, shows its progress, and waits for it.

    Args:
        command: the program and its arguments.
        log: file to append to.
        launcher: threads and binding of processes, and the grace period for stopping.
        is_over: polled; once it is true, the command is terminated.
        variables: environment variables to add to this process's own.

    Returns:
        Messages about the end, by kind; empty on success.
    """
    env = {
        # without options that are set for another torchrun
        **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
        **(variables or {}),
        "OMP_NUM_THREADS": str(launcher.threads),
        # like -P, for the ranks: nothing is imported from the working folder
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launcher.grace_seconds),
    }
    ending: Ending = {}
    opened = open_file(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, below=log.parent.parent)
    with opened as file, tempfile.TemporaryDirectory() as folder:
        env["PET_LOG_DIR"] = folder  # torchrun's, which it would leave behind elsewhere
        if (home := os.path.expanduser("~")) == "~":  # no HOME, and a user id without a name
            env["HOME"] = home = folder
        cache = Path(home) / ".cache" / "huggingface"  # Bridge keeps locks there
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            env.setdefault("MEGATRON_CONFIG_LOCK_DIR", folder)
        heartbeat = HeartbeatFile(Path(folder) / "rank-0")
        env[HeartbeatFile.variable] = str(heartbeat.path)
        process = start(command, env)
        with _forwarded_signals(process, ending) as signals:
            # a thread, since a process that outlives the job may keep the pipe open
            followed = (process, file, log, ending)
            reader = threading.Thread(target=_follow, args=followed, daemon=True)
            reader.start()
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                if heartbeat.kill_if_frozen():
                    why = f"rank 0: had no heartbeat for {heartbeat.patience} s"
                    ending.setdefault("killed", why)
                if is_over():
                    process.terminate()
                    process.wait()
            reader.join(timeout=10)
    if process.returncode == 0:
        return {}
    ending = ending or {"ended": f"exit status {process.returncode}"}
    if signals and "stopped" not in ending:  # still starting, or a job that never saves
        cause = ending.get("killed") or ending.get("error") or ending["ended"]
        ending["stopped"] = f"it was asked to stop, and ended ({cause}): run it again to resume"
    return ending


@contextmanager
def tuned_kernels(kept: Path, *, keep: bool) -> Iterator[dict[str, str]]:
    """Yields variables that give Triton a folder on this node with its picks of kernels so far.

    Triton picks a kernel by timing several, and sums of Gated DeltaNet and Mamba-2 depend on the
    pick: a job that resumes should not pick again. A user's TRITON_CACHE_DIR is kept.

    Args:
        kept: folder of the run.
        keep: whether this node adds its new picks to it; one node of a job does.
    """
    if not sees_gpu() or "TRITON_CACHE_DIR" in os.environ:
        yield {}
        return

    def copy(origin: Path, goal: Path) -> None:
        # what was picked, and not the kernels, which are code
        for file in origin.rglob("*.autotune.json"):
            place = goal / file.relative_to(origin)
            if not place.exists():
                write_whole(place, read_bytes(file), below=goal.parent)

    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        copy(kept, Path(folder))
        try:
            switches = {"TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1"}
            yield {"TRITON_CACHE_DIR": folder, **switches}
        finally:
            with suppress(OSError):  # they can be tuned again
                if keep:
                    copy(Path(folder), kept)


def refuse_bad_ending(ending: Ending, log: Path) -> None:
    """Raises as `run_job`, unless a job's processes ended well."""
    # a saved job is safe, despite other messages; a killed rank causes the messages of the others
    for kind in ("stopped", "killed", "error", "ended"):
        if kind in ending:
            sentence = f"{ending[kind]} (log: {log})"
            raise Stopped(sentence) if kind == "stopped" else RuntimeError(sentence)


def torchrun(nodes: Nodes, world_size: int, launcher: Launcher) -> list[str]:
    """Returns the command line of a job on this node, without the job's file.

    The processes of the first node have the file as an argument, and publish its name.
    """
    bound = [] if launcher.numa_binding is None else [f"--numa-binding={launcher.numa_binding}"]
    return [
        *(python_with_megatron(), "-P", "-m", "nemo_rod.run.processes.agent"),
        *(*nodes.torchrun_options(), *bound),
        *(f"--nproc-per-node={world_size // nodes.count}", "-m", "nemo_rod.megatron"),
    ]


def start(command: list[str], environment: Mapping[str, str]) -> Running:
    """Starts a command with its output in a pipe; `python -P -m MODULE`, on CPU, as a fork."""
    is_own = command[:3] == [sys.executable, "-P", "-m"]
    if is_own and not sees_gpu() and Nodes.from_environment().count == 1:
        for fork in parts.load_all("process_starters"):
            started: Running = fork(command[3:], environment, KEPT_OPEN)
            return started
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which asks the job to stop
        preexec_fn=before_program,
        pass_fds=KEPT_OPEN,
    )


def before_program() -> None:
    """Prepares a new process for its program."""
    end_with_parent()
    # Slurm signals the time limit to every process. The ranks handle the signal; torchrun would
    # die from it and take their store along.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _follow(process: Running, file: IO[bytes], log: Path, ending: Ending) -> None:
    """Copies the output to the log, shows progress, and records messages about the end."""
    assert process.stdout is not None
    is_whole = True
    for line in process.stdout:
        shown = line if line.startswith(PREFIX) else ""
        try:
            os.write(file.fileno(), line.encode())
        except OSError as error:  # a full disk, say; the job would wait for ever on a full pipe
            shown += f"{log} lacks lines of this job: {error.strerror}.\n" * is_whole
            is_whole = False
        with suppress(OSError):
            print(shown, end="", file=sys.stderr, flush=True)
        if line.startswith(PREFIX):
            continue
        if match := ERROR.search(line):
            ending.setdefault("error", f"{match[1]}: {match[2].strip()}")
        elif match := STOPPED.search(line):
            ending.setdefault("stopped", match[1].strip())
        elif match := KILLED.search(line):
            name = signal.Signals(int(match[1])).name
            ending.setdefault("killed", f"local rank {match[2]}: was ended by {name}")
        elif match := RANK.search(line):
            local = f"local rank {match[2]}:"
            if (killed := ending.get("killed", "")).startswith(local):
                ending["killed"] = killed.replace(local, f"rank {match[1]}:")


@contextmanager
def _forwarded_signals(process: Running, ending: Ending) -> Iterator[list[int]]:
    """Forwards stop signals to the job, which saves, or dies of a second Ctrl-C; yields them."""
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGINT and received.count(number) > 1:
            ending["killed"] = "by the second Ctrl-C"
            return kill_tree(process.pid)
        if number == signal.SIGINT:
            print("Saving after this step, then stopping (Ctrl-C again: at once).", file=sys.stderr)
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
