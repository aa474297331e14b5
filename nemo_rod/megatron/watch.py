"""A watch that ends the whole job, and names the rank, when a rank fails, dies or stalls.

Every rank runs one small thread beside its work. Once a second, it reports through the job's
key-value store that its process is alive and how many beats its main thread has given; rank 0 reads
all reports, the others read rank 0's. Any rank that finds a fault publishes it in the store, and
every rank exits at once. No collective needs to time out first: a thread can end a process whose
main thread hangs in one. Rank 0 gives the command that started it a sign of life, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nemo_rod.progress import PREFIX
from nemo_rod.signals import SignOfLife

FAULT_KEY = "fault"
# Time without a report after which a process counts as gone. The reporting thread waits for calls
# in C that keep Python's lock, such as pickling the plan of a large checkpoint.
GONE_SECONDS = float(SignOfLife.patience)
EXIT_STATUS = 1


class Signs:
    """Signs of progress that a main thread gives; these alone are watched by nobody."""

    def __init__(self) -> None:
        self.beats, self.doing = 0, ""

    def beat(self) -> None:
        """Counts progress of the main thread; called several times per step.

        Among ranks that wait for each other, the one with the fewest beats is the cause.
        """
        self.beats += 1

    def announce(self, doing: str) -> None:
        """Says what the main thread begins, where it may wait for a disk; "" when it is done."""
        self.doing = doing


UNWATCHED = Signs()


class Watch(Signs):
    """Monitors the ranks of a job.

    Args:
        store: a `torch.distributed.Store` that outlives any one rank, such as torchrun's.
        rank: rank of this process.
        world_size: number of processes.
        stall_seconds: seconds without a beat after which a main thread counts as stalled; 0 for
            never. It must exceed the duration of the longest single step or checkpoint.
        leave: function that ends this process; replaced in tests only.
        sign: sign of life of this process to the command that started it.
    """

    @classmethod
    def of_this_job(cls, *, stall_seconds: float) -> Watch:
        """Creates a watch over the ranks that torchrun started, on a connection of its own.

        The main thread may occupy the default connection while it waits in a collective.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"nemo_rod/{attempt}", store)  # type: ignore[attr-defined]
        sign = SignOfLife.of_this_job() if rank == 0 else None
        return cls(prefixed, rank, world_size, stall_seconds=stall_seconds, sign=sign)

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        stall_seconds: float,
        leave: Callable[[int], Any] = os._exit,
        sign: SignOfLife | None = None,
    ) -> None:
        super().__init__()
        self.store, self.rank, self.world_size = store, rank, world_size
        self.stall_seconds, self.leave, self.sign = stall_seconds, leave, sign
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nemo-rod-watch", daemon=True)

    def start(self) -> None:
        """Starts the watch with a first report: a rank that never reported is not missed."""
        self._report()
        self._thread.start()

    def fail(self, why: str) -> None:
        """Reports to all ranks that this one failed, and why."""
        self._declare(f"rank {self.rank}: {why}")

    def close(self) -> None:
        """Ends the watch before the process does."""
        self._stop.set()
        self._thread.join()
        if self.sign is not None:
            self.sign.end()

    def _run(self) -> None:
        heard: dict[int, tuple[str, float]] = {}  # rank -> its last report and when it arrived
        moved: dict[int, tuple[str, float]] = {}  # rank -> its beats and when they last changed
        try:
            while not self._stop.wait(1.0):
                self._report()
                self._listen(heard, moved)
                if self.store.check([FAULT_KEY]):
                    self._end(self.store.get(FAULT_KEY).decode())
        except Exception as error:  # the store is gone, and with it the process that runs the job
            if not self._stop.is_set():
                self._end(f"rank {self.rank} lost the job's store ({type(error).__name__})")

    def _report(self) -> None:
        if self.sign is not None:
            self.sign.give()
        self.store.set(self._key(self.rank), f"{time.time_ns()} {self.beats} {self.doing}")

    def _listen(self, heard: dict, moved: dict) -> None:
        now = time.monotonic()
        reports = self._reports()
        for rank, (alive, beats, _) in reports.items():
            for last, value in ((heard, alive), (moved, beats)):
                if last.get(rank, ("", 0.0))[0] != value:
                    last[rank] = (value, now)
            if now - heard[rank][1] > GONE_SECONDS:
                self._declare(f"rank {rank}: its process is gone")
        if self.rank == 0:
            self._find_stalled(moved, now, {rank: doing for rank, (*_, doing) in reports.items()})

    def _reports(self) -> dict[int, list[str]]:
        """Returns time, beats and doing of the ranks that this one listens to and that have begun.

        Two questions to the store, however many ranks there are, once all of them have.
        """
        ranks: Sequence[int] = range(self.world_size) if self.rank == 0 else range(1)
        if not self.store.check([self._key(rank) for rank in ranks]):
            # torchrun monitors the start
            ranks = [rank for rank in ranks if self.store.check([self._key(rank)])]
        reports = self.store.multi_get([self._key(rank) for rank in ranks]) if ranks else []
        texts = zip(ranks, reports, strict=True)
        return {rank: text.decode().split(" ", 2) for rank, text in texts}

    def _find_stalled(self, moved: dict, now: float, doing: dict[int, str]) -> None:
        """Declares stalled the ranks with the fewest beats; all others wait for them.

        After half of that time it says so, to give a slow disk's owner the other half.
        """
        still = {rank: now - since for rank, (beats, since) in moved.items() if beats != "0"}
        longest = max(still.values(), default=0.0)
        if not self.stall_seconds or longest <= self.stall_seconds / 2:
            self._warned = False
            return
        fewest = min(int(moved[rank][0]) for rank in still)
        behind = [rank for rank in still if int(moved[rank][0]) == fewest]
        # the others wait for one that reads
        behind = [rank for rank in behind if doing.get(rank)] or behind
        whom = "all ranks" if len(behind) == self.world_size else f"rank {behind[0]}"
        what = f" while it {doing[behind[0]]}" if doing.get(behind[0]) else ""
        limit = f"launcher.stall_seconds={self.stall_seconds:g}"
        if longest > self.stall_seconds:
            self._declare(f"{whom}: stalled for {longest:.0f} s{what}, longer than {limit}")
        elif not self._warned:
            self._warned = True
            waits = f"no progress for {longest:.0f} s{what}; {limit} ends the job"
            print(f"{PREFIX}{whom}: {waits}", flush=True)

    def _declare(self, fault: str) -> None:
        # the first fault is the cause; later ones follow from it
        self.store.compare_set(FAULT_KEY, "", fault)

    def _end(self, fault: str) -> None:
        rank, _, why = fault.partition(": ")
        print(f"nemo-rod error on {rank}: {why or fault}", flush=True)
        if self.sign is not None:
            self.sign.end()
        self.leave(EXIT_STATUS)

    def _key(self, rank: int) -> str:
        return f"alive/{rank}"
