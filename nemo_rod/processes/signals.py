"""Stop signals of a process, what its children inherit of them, and how it ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker

# These mean: save at the end of the step, then exit. Slurm announces a preemption with the first,
# and job scripts announce the time limit with the last.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """A job stopped on request; it has saved, and resumes from there when started again."""

    exit_status = 75  # EX_TEMPFAIL of <sysexits.h>


def leave_ray(status: int) -> None:
    """Ends this process at once if it has used Ray; otherwise does nothing.

    When a process ends, Ray's library joins the threads of its own pool, and may wait for ever:
    a job would hold its nodes until its time limit, with its work done. Python's own exit handlers
    run, Ray's among them.

    Args:
        status: Exit status of the process.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> None:
    """Asks Linux to end this process when its parent dies, so that no job outlives its command.

    Two jobs in one folder would spoil each other's files.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def keep_signals_from_helpers() -> None:
    """Delivers stop signals to this process alone, not to those that it starts.

    Slurm signals every process of a job at once, even the helpers that write a checkpoint, which
    would then break. Children inherit the signals blocked in this thread; a second thread leaves
    them unblocked, and Python still runs the handlers in the main thread.
    """

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Event().wait()

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # starting this first helper unblocks some signals again
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=listen, name="nemo-rod-signals", daemon=True).start()
