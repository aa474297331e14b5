"""The log of a stage: time and place of every start, and every end.

`<run_dir>/launch/stages/<stage>.jsonl`. The file is also the lock that keeps a second command out
of a stage in progress.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nemo_rod.files import MOST_BYTES, interpreting, lock, open_file, read_lines, writing
from nemo_rod.signals import KEPT_OPEN, Stopped

_SLURM = {"job": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "restart": "SLURM_RESTART_COUNT"}


class StageLog:
    """The log of one stage in one run folder."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.name, self.run_dir = name, run_dir
        self.path = run_dir / "launch" / "stages" / f"{name}.jsonl"

    @contextmanager
    def only_one(self, patience: float = 0.0) -> Iterator[None]:
        """Locks the stage against a second command.

        Args:
            patience: seconds to wait for the lock.

        Raises:
            ValueError: another command holds the lock for longer.
        """
        deadline = time.monotonic() + patience
        with self._open() as file:
            while not lock(file.fileno()):
                if time.monotonic() >= deadline:
                    raise ValueError(
                        f"Another nemo-rod is running {self.name} in {self.run_dir}: wait for it "
                        "to end, or choose another run_dir."
                    )
                time.sleep(0.1)
            KEPT_OPEN.append(file.fileno())
            try:
                yield
            finally:
                KEPT_OPEN.remove(file.fileno())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Records the start and the end of an attempt."""
        # an interactive shell may keep variables of an allocation; only srun sets those of a step
        environment = os.environ if "SLURM_STEP_ID" in os.environ else {}
        slurm = {key: environment[name] for key, name in _SLURM.items() if name in environment}
        self._write("began", host=platform.node(), pid=os.getpid(), **slurm)
        try:
            yield
        except Stopped as stop:
            self._write("stopped", why=str(stop))
            raise
        except BaseException as error:
            self._write("failed", why=" ".join(str(error).split()) or type(error).__name__)
            raise
        self._write("done")

    def events(self) -> list[dict[str, Any]]:
        """Returns all events, oldest first.

        Raises:
            ValueError: a line is damaged, by its number.
        """
        events = read_lines(self.path, "time", "event") if self.path.exists() else []
        for number, event in enumerate(events, start=1):
            with interpreting(self.path, cure=f"restore it from a copy, or remove line {number}"):
                required = {"began": ("host",), "failed": ("why",), "stopped": ("why",)}
                texts = [event[name] for name in ("event", *required.get(event["event"], ()))]
                # Python has no dates for much larger numbers
                in_time = 0 <= event["time"] < 1e11
                if not (all(isinstance(text, str) for text in texts) and in_time):
                    raise TypeError(f"line {number} is {event}")
        return events

    def is_held(self) -> bool:
        """Returns whether a process on this machine is working on the stage."""
        if not self.path.exists():
            return False
        with open_file(self.path, below=self.run_dir) as file:
            return not lock(file.fileno())

    def _open(self) -> IO[bytes]:
        return open_file(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, below=self.run_dir)

    def _write(self, event: str, **more: Any) -> None:
        row = {"time": round(time.time(), 1), "event": event, **more}
        with writing(self.path), self._open() as file:
            begin = file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            # without a line that a crash cut off
            file.truncate(begin + file.read().rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
