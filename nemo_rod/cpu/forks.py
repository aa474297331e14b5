"""Programs on CPU as forks of a process that has imported NVIDIA's stack.

Megatron-Bridge takes 12 seconds to import, in every process of every job: longer than a small model
trains. The standard library's fork server imports it once, and all programs of a command are forks
of that. With a GPU every process imports for itself, because imports may use CUDA, which does not
survive a fork.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from glob import glob
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from nemo_rod import parts
from nemo_rod.run.processes.agent import guard_for
from nemo_rod.run.processes.torchrun import before_program
from nemo_rod.signals import STOP_SIGNALS

AGENT, TORCHRUN = "nemo_rod.run.processes.agent", "torch.distributed.run"


class Fork:
    """`python -m MODULE ARGUMENTS` as a fork, with the interface of `subprocess.Popen`.

    Args:
        program: the module's name, and its arguments. The ranks of torchrun are forks as well.
        environment: all variables of the program.
        kept_open: descriptors that it keeps open beside the standard ones.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], kept_open: Sequence[int] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["nemo_rod.cpu.preloaded"])
        removed = _environment_of_server().keys() - environment.keys()
        read, write = os.pipe()
        files = [Connection(write), *(Connection(os.dup(number)) for number in kept_open)]
        self._process = context.Process(
            target=_run, args=(list(program), dict(environment), removed, files)
        )
        # Slurm signals every process; the server inherits the blocked signals and ignores them
        resource_tracker.ensure_running()  # it would unblock some again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
        except OSError as error:
            if error.errno is not None:
                raise
            raise ValueError(
                f"TMPDIR={tempfile.gettempdir()} is too long for the names of sockets: set it to a "
                "folder of fewer than 80 letters."
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for file in files:
            file.close()
        self.stdout = os.fdopen(read, encoding="utf-8", errors="replace")
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, as `poll` returns it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit status; negative for a signal, None while the program runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status.

        Raises:
            subprocess.TimeoutExpired: the program still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def terminate(self) -> None:
        """Asks the program to end."""
        self._process.terminate()


@functools.cache
def _environment_of_server() -> dict[str, str]:
    return dict(os.environ)  # the server starts with the first fork


def _run(
    program: list[str], environment: dict[str, str], removed: set[str], files: list[Connection]
) -> None:
    os.setsid()  # Ctrl-C reaches the command alone, which asks the job to stop
    before_program()  # to end with the server, which lives while a fork of it does:
    threading.Thread(target=_end_with_command, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for descriptor in (1, 2):
        os.dup2(files[0].fileno(), descriptor)
    files[0].close()
    # a line at a time, as `python -u`
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
    for name in removed:
        os.environ.pop(name, None)
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if any(glob("*.dist-info", root_dir=path) for path in paths if path):
        parts.all_entry_points.cache_clear()  # packages that the server may not have seen
    if program[0] in (AGENT, TORCHRUN):
        _torchrun(program[1:])
    else:
        _as_main(program)


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _torchrun(arguments: list[str]) -> None:
    """Runs torchrun on this machine, with ranks that are forks."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import elastic_launch

    options = run.parse_args(["--start-method=fork", *arguments])
    guard_for(arguments)
    # as `--standalone`
    options.rdzv_backend, options.rdzv_endpoint = "c10d", "127.0.0.1:0"
    options.rdzv_id = str(uuid.uuid4())
    config, _, _ = run.config_from_args(options)
    # The rendezvous looks up a name for each of its events, which nothing records here, by a search
    # of all modules for every frame above it: of thousands, most of a small job's agent's work.
    dynamic_rendezvous.get_method_name = lambda depth=2: "an event"
    # No rank begins before all are forked. A rank that connects to the agent's store makes the
    # agent's thread look up its name, under a lock of the C library; a fork of that moment would
    # inherit the lock, held for ever, and hang in its own first look-up.
    all_forked = multiprocessing.get_context("fork").Barrier(config.nproc_per_node)
    program = [options.training_script, *options.training_script_args]
    try:
        elastic_launch(config, _rank)(all_forked, program)
    except ChildFailedError as failed:
        sys.exit(str(failed))


def _rank(all_forked: Barrier, program: list[str]) -> None:
    all_forked.wait()
    _as_main(program)


def _as_main(program: list[str]) -> None:
    """Runs a module as `python -m` does.

    But `__main__` stays the same: the processes that write checkpoints import that first.
    """
    sys.argv = program
    try:
        runpy.run_module(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise  # torch's agent waits for the value of a rank, even of one that is gone
