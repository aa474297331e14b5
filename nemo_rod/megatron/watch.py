"""Ends the whole job, and names the rank, when a rank fails, dies or stalls.

Every rank runs one small thread beside its work. Once a second, it reports through the job's
key-value store that its process is alive and how many beats its main thread has counted; rank 0
reads all reports, the others read rank 0's. Any rank that detects a fault publishes it in the
store, and every rank exits at once. No collective needs to time out first: a thread can end a
process whose main thread hangs in one. Rank 0 also keeps the heartbeat file that the command reads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nemo_rod.jobs import FAULT_KEY, STORE, job_store
from nemo_rod.progress import PREFIX
from nemo_rod.signals import HeartbeatFile

# Time without a report after which a process counts as gone. The reporting thread waits for calls
# in C that keep Python's lock, such as pickling the plan of a large checkpoint.
GONE_SECONDS = float(HeartbeatFile.patience)


class Heartbeat:
    """Heartbeat of the main thread; without effect unless a `Watch` reads it."""

    def __init__(self) -> None:
        self.beats, self.activity = 0, ""

    def beat(self) -> None:
        """Counts progress of the main thread; called several times per step.

        Among ranks that wait for each other, the one with the fewest beats is the cause.
        """
        self.beats += 1

    def announce(self, activity: str) -> None:
        """Sets the current activity, if it may wait for a disk; "" when it is done."""
        self.activity = activity


UNWATCHED = Heartbeat()


class Watch(Heartbeat):
    """Monitors the ranks of a job.

    Args:
        store: a `torch.distributed.Store` that outlives any one rank, such as torchrun's.
        rank: rank of this process.
        world_size: number of processes.
        stall_seconds: seconds without a beat after which a main thread counts as stalled; 0 for
            never. It must exceed the duration of the longest single step or checkpoint.
        leave: function that ends this process; replaced in tests only.
        file: heartbeat file that the command monitors; on rank 0 only.
    """

    @classmethod
    def for_this_job(cls) -> Watch:
        """Creates a watch over the ranks that torchrun started, on a connection of its own.

        The main thread may occupy the default connection while it waits in a collective.
        """
        environ = os.environ
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        address = environ.get(STORE, f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
        store = job_store(address, environ.get("TORCHELASTIC_RUN_ID", "none"))
        file = HeartbeatFile.from_environment() if rank == 0 else None
        return cls(store, rank, world_size, stall_seconds=0.0, file=file)

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        stall_seconds: float,
        leave: Callable[[int], Any] = os._exit,
        file: HeartbeatFile | None = None,
    ) -> None:
        super().__init__()
        self.store, self.rank, self.world_size = store, rank, world_size
        self.stall_seconds, self.leave, self.file = stall_seconds, leave, file
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemo-rod-watch", daemon=True)

    def start(self) -> None:
        """Starts the watch with a first report: only ranks that have reported can count as gone."""
        self._report()
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Reports to all ranks that this one failed, and why."""
        self._declare(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Ends the watch before the process does."""
        self._stop.set()
        self._thread.join()
        if self.file is not None:
            self.file.remove()

    def _run(self) -> None:
        alive: dict[int, tuple[str, float]] = {}  # rank -> its last report and when it arrived
        moved: dict[int, tuple[str, float]] = {}  # rank -> its beats and when they last changed
        try:
            while not self._stop.wait(1.0):
                self._report()
                self._check(alive, moved)
                if self.store.check([FAULT_KEY]):
                    self._end(self.store.get(FAULT_KEY).decode())
        except Exception as error:  # the store ended with the process that runs the job
            if not self._stop.is_set():
                self._end(f"rank {self.rank} lost the job's store ({type(error).__name__})")

    def _report(self) -> None:
        if self.file is not None:
            self.file.touch()
        report = f"{time.time_ns()} {self.beats} {self.activity}"
        self.store.set(f"alive/{self.rank}", report)

    def _check(self, alive: dict, moved: dict) -> None:
        """Declares ranks whose process is gone and, on rank 0, those that are stalled."""
        ranks: Sequence[int] = range(self.world_size) if self.rank == 0 else range(1)
        if not self.store.check([f"alive/{rank}" for rank in ranks]):
            # torchrun monitors the start
            ranks = [rank for rank in ranks if self.store.check([f"alive/{rank}"])]
        texts = self.store.multi_get([f"alive/{rank}" for rank in ranks]) if ranks else []
        # time, beats and activity
        reports = {r: text.decode().split(" ", 2) for r, text in zip(ranks, texts, strict=True)}
        now = time.monotonic()
        for rank, (report, beats, _) in reports.items():
            for last, value in ((alive, report), (moved, beats)):
                if last.get(rank, ("", 0.0))[0] != value:
                    last[rank] = (value, now)
            if now - alive[rank][1] > GONE_SECONDS:
                self._declare(f"rank {rank}: its process is gone")
        if self.rank == 0:
            self._check_stalled(moved, now, {rank: entry[2] for rank, entry in reports.items()})

    def _check_stalled(self, moved: dict, now: float, activity: dict[int, str]) -> None:
        """Declares stalled the ranks with the fewest beats, after a warning at half of the time."""
        still = {rank: now - since for rank, (beats, since) in moved.items() if beats != "0"}
        longest = max(still.values(), default=0.0)
        if not self.stall_seconds or longest <= self.stall_seconds / 2:
            self._warned = False
            return
        fewest = min(int(moved[rank][0]) for rank in still)
        behind = [rank for rank in still if int(moved[rank][0]) == fewest]
        # the others wait for one that reads
        behind = [rank for rank in behind if activity.get(rank)] or behind
        culprit = "all ranks" if len(behind) == self.world_size else f"rank {behind[0]}"
        context = f" while it {activity[behind[0]]}" if activity.get(behind[0]) else ""
        limit = f"launcher.stall_seconds={self.stall_seconds:g}"
        if longest > self.stall_seconds:
            self._declare(f"{culprit}: stalled for {longest:.0f} s{context}, longer than {limit}")
        elif not self._warned:
            self._warned = True  # half of the time is left, to fix a slow disk, say
            warning = f"no progress for {longest:.0f} s{context}; {limit} ends the job"
            print(f"{PREFIX}{culprit}: {warning}", flush=True)

    def _declare(self, fault: str) -> None:
        # the first fault is the cause; later ones follow from it
        self.store.compare_set(FAULT_KEY, "", fault)

    def _end(self, fault: str) -> None:
        rank, _, reason = fault.partition(": ")
        print(f"nemo-rod error on {rank}: {reason or fault}", flush=True)
        if self.file is not None:
            self.file.remove()
        self.leave(1)
