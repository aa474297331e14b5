"""Stop signals and the heartbeat file of a process."""

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

# Files that the processes of a job keep open, such as the lock of its stage, so that it is released
# when they have ended, not when the command has that started them. A global, because the code that
# starts a job does not know the lock of its stage.
KEPT_OPEN: list[int] = []


class Stopped(BaseException):
    """A job stopped on request; it has saved, and resumes from there when started again."""

    exit_status = 75  # EX_TEMPFAIL of <sysexits.h>


class HeartbeatFile:
    """A file that a process touches every second, so that its command can see it freeze.

    Args:
        path: the file; it holds the process's number while the heartbeat is monitored.
    """

    variable = "NEMO_ROD_HEARTBEAT_FILE"  # environment variable: the file's path
    # checks, a second apart, without a new beat; pauses of the command itself do not count
    patience = 60

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last, self._unchanged = 0, 0

    @classmethod
    def from_environment(cls) -> HeartbeatFile | None:
        """Returns the file that the command monitors; None if it monitors none."""
        return cls(Path(os.environ[cls.variable])) if cls.variable in os.environ else None

    def touch(self) -> None:
        """Beats; on a full disk there is no file, and nothing is monitored."""
        with suppress(OSError):
            if not self.path.exists():
                self.path.write_text(str(os.getpid()))
            os.utime(self.path)

    def remove(self) -> None:
        """Ends the monitoring."""
        self.path.unlink(missing_ok=True)

    def kill_if_frozen(self) -> bool:
        """Kills the process if the file is unchanged for `patience` checks; returns whether."""
        try:
            beat, number = self.path.stat().st_mtime_ns, int(self.path.read_text() or 0)
        except FileNotFoundError:  # not created yet, or removed
            return False
        self._unchanged = self._unchanged + 1 if beat == self._last else 0
        self._last = beat
        if self._unchanged < self.patience or not number:
            return False
        self.remove()
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
            return True
        return False


def leave_ray(status: int) -> None:
    """Ends this process at once, with an exit status, if it has used Ray.

    At the end of a process, Ray's library joins the threads of its own pool and may wait for ever:
    a finished job would hold its nodes until its time limit. Python's own exit handlers run, Ray's
    among them.
    """
    if (ray := sys.modules.get("ray")) is None or not ray.is_initialized():
        return
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # a handler of NeMo-RL v0.7.0's libraries closes it
            output.flush()
    os._exit(status)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks Linux to signal this process when its parent dies, so that no job outlives its command.

    Two jobs in one folder would corrupt each other's files.
    """
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_parent_death_signal, number)


def kill_tree(pid: int) -> None:
    """Kills a process and all that it has started, and these, whatever sessions they lead."""
    with suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in file.read_text().split():
                kill_tree(int(child))
        os.kill(pid, signal.SIGKILL)


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
