"""How a process is asked to stop, and what it passes on to those that it starts."""

from __future__ import annotations

import ctypes
import signal
import threading
from multiprocessing import resource_tracker

# What means: save at the end of the step, and go. Slurm announces a preemption with the first, and
# job scripts announce the time limit with the last.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """A job was asked to stop; it saved, and goes on from there when it is started again."""

    exit_status = 75  # EX_TEMPFAIL of <sysexits.h>


def end_with_parent() -> None:
    """Asks Linux to end this process when its parent dies, so that no job outlives its command.

    Two jobs in one folder would spoil each other's files.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def keep_signals_from_helpers() -> None:
    """Lets this process alone hear that it is to stop, and not those that it starts.

    Slurm tells every process of a job at once, so also those that write a checkpoint for this one:
    the checkpoint would break. They inherit what this thread blocks. Another thread does not block
    it, and Python runs the handlers in the main thread all the same.
    """

    def listen() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Event().wait()

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # the start of this first helper unblocks some again
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=listen, name="nemo-rod-signals", daemon=True).start()
