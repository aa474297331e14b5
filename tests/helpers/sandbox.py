"""What damaged files and random words are tried in: a folder that is put back, and a time limit."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings


class Hangs(BaseException):
    """A case took too long; it is no Exception, which a reader may catch."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `Hangs` in what takes longer: of this process's own time, and twenty times as long by
    the clock, as for what waits. A busy machine takes its time.
    """

    def too_long(*_: object) -> None:
        raise Hangs(f"it took longer than {seconds} s")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, 20 * seconds),
    )
    before = [signal.signal(number, too_long) for number, *_ in timers]
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def cases(number: int) -> settings:
    """So many cases, none of which is kept for a later run."""
    return settings(
        max_examples=number,
        database=None,
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
    )


class Sandbox:
    """A folder with known content.

    Args:
        root: the folder; its content now is what `restore` brings back.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamps = self._look()
        self.content = {Path(path): Path(path).read_bytes() for path in self._stamps}

    def files(self, *patterns: str) -> list[Path]:
        """Returns the files that match a glob below the folder, in order."""
        paths = {path for pattern in patterns for path in self.root.glob(pattern)}
        return sorted(paths & self.content.keys())

    def write(self, path: Path, content: bytes | Callable[[], object] | None) -> None:
        """Changes a file by other bytes or by a function, or removes it."""
        if content is None:
            path.unlink()
        elif callable(content):
            content()
        else:
            path.write_bytes(content)
        self._note(path)

    def changed(self) -> list[Path]:
        """Returns the files that were changed, made or removed since the last `write`."""
        now = self._look()
        return sorted(Path(path) for path, _ in now.items() ^ self._stamps.items())

    def restore(self, *paths: Path) -> None:
        """Brings files back; removes what was not there."""
        for path in {*paths}:
            if path.is_symlink() or path.is_fifo():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)
            if path in self.content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.content[path])
            else:
                path.unlink(missing_ok=True)
            self._note(path)

    def _note(self, path: Path) -> None:
        self._stamps.pop(str(path), None)
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            state = path.lstat()
            self._stamps[str(path)] = state.st_mtime_ns, state.st_size

    def _look(self) -> dict[str, tuple[int, int]]:
        """Returns time and size of every file; quick, as it is asked after every case."""
        stamps, waiting = {}, [str(self.root)]
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        state = entry.stat(follow_symlinks=False)
                        stamps[entry.path] = state.st_mtime_ns, state.st_size
        return stamps
