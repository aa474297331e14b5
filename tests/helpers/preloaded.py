"""Runs programs under torchrun's own agent, in processes that have imported Megatron already.

The import of torch, Megatron and transformers takes every process ten seconds and more. This one
does it once, and each run is a fork of it: the launcher is torch's elastic agent as `torchrun` uses
it, its ranks are processes of their own, and both end with the run.

    python preloaded.py     each line of standard input is a run, as JSON: see `Run`
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

STACKS = signal.SIGUSR2  # a run's processes answer it with the stacks of all their threads
MODULES = ("nemo_rod.megatron.train_job", "nemo_rod.megatron.forward_jobs")


@dataclass
class Run:
    """What one run is told, and the folder where it leaves its logs, its pid and its exit code."""

    nproc: int
    target: str
    arguments: list[str]
    environment: dict[str, str]
    path: list[str]
    folder: str
    logs: str

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> None:
    for module in MODULES:
        __import__(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # runs are not waited for
    for line in sys.stdin:
        run = Run(**json.loads(line))
        if os.fork() == 0:
            code = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = launch(run)
            except BaseException:
                traceback.print_exc()
            (Path(run.logs) / "exit.tmp").write_text(str(code))
            os.replace(Path(run.logs) / "exit.tmp", Path(run.logs) / "exit")
            os._exit(code)


def launch(run: Run) -> int:
    """What `torchrun --standalone` does with a script, with a function instead."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives the tests
    os.setsid()
    faulthandler.register(STACKS, file=2)  # of the forks as well: wherever they write errors
    (Path(run.logs) / "pid").write_text(str(os.getpid()))
    log = os.open(Path(run.logs) / "launcher.log", os.O_CREAT | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.chdir(run.folder)
    os.environ.clear()
    os.environ.update(run.environment)
    sys.path[:0] = run.path

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=run.nproc,
        run_id=Path(run.logs).name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=run.logs, redirects=Std.ALL),
    )
    # No rank begins before all are forked. A rank that connects to the agent's store makes the
    # agent's thread look up its name, under a lock of the C library; a fork of that moment would
    # inherit the lock, held for ever, and hang in its own first look-up.
    all_forked = multiprocessing.get_context("fork").Barrier(run.nproc)
    try:
        elastic_launch(config, rank)(all_forked, run.target, run.arguments)
    except ChildFailedError as failed:
        print(failed)
        return 1
    return 0


def rank(all_forked: Barrier, target: str, arguments: list[str]) -> None:
    """One process of a run: the program, as if Python had been started with it.

    But this file stays the main module: the processes that help to write checkpoints import that
    first, and they need no Megatron.
    """
    all_forked.wait()
    sys.argv = [target, *arguments]
    try:
        if target.endswith(".py"):
            sys.path.insert(0, str(Path(target).parent))
            code = compile(Path(target).read_text(), target, "exec")
            exec(code, {"__name__": "__main__", "__file__": target})
        else:
            runpy.run_module(target, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise  # torch's agent waits for what a function returns, even of a process that is gone
    except BaseException:
        traceback.print_exc()  # into this rank's log, as Python does at the end of a program
        raise


if __name__ == "__main__":
    main()
