"""Start of a command's process: as a program, or torchrun in a fork.

The import of torch, Megatron and transformers takes every process ten seconds, and a small run has
dozens of jobs. Without a GPU, one process imports them for all jobs of a run: Python's own fork
server. The torchrun in its forks is torch's, and starts its ranks as forks too.
"""

from __future__ import annotations

import _thread
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from nemo_rod.signals import KEPT_OPEN, STOP_SIGNALS, end_with_parent

_OF_TORCHRUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # it handles them


def sees_gpu() -> bool:
    """Returns whether this machine shows a GPU, whose driver does not survive a fork."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def start_program(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a program, whose standard output and error are the process's `stdout`."""
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which asks the job to stop
        preexec_fn=_before_program,
        pass_fds=KEPT_OPEN,
    )


def _before_program() -> None:
    end_with_parent()
    # Slurm signals the time limit to every process. The ranks handle the signal; torchrun would
    # die from it and take their store along.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Fork:
    """A fork of the process that has imported Megatron."""

    def __init__(self, process: multiprocessing.process.BaseProcess, output: int) -> None:
        self.stdout = os.fdopen(output, errors="replace")
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of the signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit status, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: if it has not ended after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()


Running = subprocess.Popen[str] | Fork


def start_torchrun(command: list[str], env: dict[str, str]) -> Fork:
    """Starts torchrun on this machine.

    Args:
        command: `PYTHON -m torch.distributed.run OPTIONS -m PACKAGE ARGUMENT`; the package has a
            `__main__`.
        env: its environment. Variables that libraries read at import take effect only at the
            first start.

    Returns:
        The process, whose standard output and error are its `stdout`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nemo_rod.run.processes.preloaded"])
    reading, writing = context.Pipe(duplex=False)
    # connections can be passed to another process
    open_files = [Connection(os.dup(number)) for number in KEPT_OPEN]
    process = context.Process(target=_torchrun, args=(command, env, writing, open_files))
    before = dict(os.environ)
    # a server that starts here gets this environment, and no signal that stops jobs
    resource_tracker.ensure_running()  # its start would unblock some signals again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.environ.update(env)
    try:
        process.start()
    finally:
        for name in env.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for connection in (writing, *open_files):
        connection.close()
    return Fork(process, os.dup(reading.fileno()))


def _torchrun(
    command: list[str], env: dict[str, str], output: Connection, open_files: list[Connection]
) -> None:
    """Runs torchrun in the forked process; `open_files` merely stay open in it."""
    os.setsid()
    end_with_parent()  # the server, which outlives the command while it has forks
    threading.Thread(target=_end_with_command, daemon=True).start()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the ranks, not for torchrun
    for standard in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), standard.fileno())
    output.close()
    os.environ.clear()
    os.environ.update(env)
    from torch.distributed.run import main, parse_args

    *options, _, module, argument = command[command.index("torch.distributed.run") + 1 :]
    program = find_spec(f"{module}.__main__")
    assert program is not None and program.origin is not None
    arguments = [*options, "--start-method=fork", "--run-path", program.origin, argument]
    _deliver_signals_after(parse_args(arguments).nproc_per_node)
    main(arguments)


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _deliver_signals_after(forks: str) -> None:
    """Holds stop signals back until this process has forked `forks` times.

    Torchrun's handler raises an error, which Python drops while it forks: the signal would be lost.
    The forks start without its handlers.
    """
    forked, torchrun = threading.Semaphore(0), os.getpid()

    def deliver() -> None:
        for _ in range(int(forks)):
            forked.acquire()
        time.sleep(0.1)  # for the last fork to return
        while True:
            _thread.interrupt_main(signal.Signals(signal.sigwait(_OF_TORCHRUN)))

    def begin_anew() -> None:
        if os.getppid() != torchrun:
            return  # a fork of a rank
        for number in _OF_TORCHRUN:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TORCHRUN)
    os.register_at_fork(after_in_parent=forked.release, after_in_child=begin_anew)
    threading.Thread(target=deliver, daemon=True).start()
