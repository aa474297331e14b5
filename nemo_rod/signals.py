"""Stop signals of a process, what its children inherit of them, and how it ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

# These mean: save at the end of the step, then exit. Slurm announces a preemption with the first,
# and job scripts announce the time limit with the last.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


# Files that the processes of a job keep open, such as the lock of its stage: it is free once they
# have ended, not once the command that started them has. Not an argument, because what starts a job
# does not know under which lock its stage runs.
KEPT_OPEN: list[int] = []


class Stopped(BaseException):
    """A job stopped on request; it has saved, and resumes from there when started again."""

    exit_status = 75  # EX_TEMPFAIL of <sysexits.h>


class SignOfLife:
    """A file that a process touches every second, and by which its command sees it freeze.

    Args:
        file: the file; it holds the process's number while there is a sign to wait for.
    """

    variable = "NEMO_ROD_SIGN_OF_LIFE"  # in the environment: the file's path
    # looks, a second apart, without a new sign; pauses of the command itself do not count
    patience = 60

    def __init__(self, file: Path) -> None:
        self.file = file
        self._last, self._looks = 0, 0

    @classmethod
    def of_this_job(cls) -> SignOfLife | None:
        """Returns the sign that the command waits for; None if it waits for none."""
        return cls(Path(os.environ[cls.variable])) if cls.variable in os.environ else None

    def give(self) -> None:
        """Gives a sign; without room for the file there is none to wait for."""
        with suppress(OSError):
            if not self.file.exists():
                self.file.write_text(str(os.getpid()))
            os.utime(self.file)

    def end(self) -> None:
        """Says that no more signs will come."""
        self.file.unlink(missing_ok=True)

    def end_frozen(self) -> bool:
        """Looks for a new sign; kills the process, and returns True, if there was none for long."""
        try:
            sign, number = self.file.stat().st_mtime_ns, int(self.file.read_text() or 0)
        except FileNotFoundError:  # not yet, or no more
            return False
        self._looks = self._looks + 1 if sign == self._last else 0
        self._last = sign
        if self._looks < self.patience or not number:
            return False
        self.end()
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
            return True
        return False


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


def adopt_orphans() -> None:
    """Asks Linux to make this process the parent of descendants whose own parents end."""
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def kill_children() -> None:
    """Kills every child of this process, and those that it adopts from them, until none is left."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found += map(int, (thread / "children").read_text().split())
    return found


def name_process(name: str) -> None:
    """Names this process for `top`, in up to 15 characters; a fork has its parent's name."""
    set_name = 15  # PR_SET_NAME of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_name, name.encode())


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
