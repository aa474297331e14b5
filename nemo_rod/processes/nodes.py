"""A command that runs on several nodes: the first one leads, the others follow.

Every node of a Slurm job starts the same command. The first node's does the stage. Whenever that
starts torchrun, it tells the others, through a small key-value store, to start theirs; and it hears
from them how theirs ended.

    order/<n>        what to start, or that the stage is over
    ended/<n>/<node> what a node's processes said of their end
    left/<node>      a follower has nothing more to do
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# What the processes of a node said of their end, by kind; empty if they ended well.
Ending = dict[str, str]

_GATHER = timedelta(minutes=30)  # containers may take their time to start
_LEAVE = timedelta(seconds=30)


@dataclass(frozen=True)
class Order:
    """One start of torchrun on all nodes.

    Attributes:
        job_file: for `python -m nemo_rod.megatron`.
        log: of the first node; the others add their number.
        world_size: processes in all.
        port: where torchrun's processes meet, on the first node.
    """

    job_file: str
    log: str
    world_size: int
    port: int


@dataclass(frozen=True)
class Nodes:
    """The nodes that this command runs on.

    Attributes:
        count: of nodes.
        rank: of this node; 0 leads.
        host: address of the first node.
        port: of the store, on the first node.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of_this_job(cls) -> Nodes:
        """What the job script and Slurm say; one node outside such a job."""
        if "NEMO_ROD_HEAD" not in os.environ:
            return cls()
        host, port = os.environ["NEMO_ROD_HEAD"].rsplit(":", 1)
        return cls(
            count=int(os.environ["SLURM_NTASKS"]),
            rank=int(os.environ["SLURM_PROCID"]),
            host=host,
            port=int(port),
        )

    @contextmanager
    def led(self) -> Iterator[None]:
        """On the first node, around the whole command: the others follow until it is over."""
        if self.count == 1:
            yield
            return
        store = self._store(is_master=True)
        patience = _LEAVE  # after a failure: Slurm ends the others when this command ends
        try:
            yield
            patience = _GATHER  # some may not have started yet
        finally:
            store.set(f"order/{store.add('orders', 1)}", "")
            deadline = time.monotonic() + patience.total_seconds()
            while not self._have_left(store) and time.monotonic() < deadline:
                time.sleep(0.2)

    def start(self, order: Order) -> Start:
        """On the first node: has all others start torchrun for a job."""
        if self.count == 1:
            return Start(self, order)
        store = self._store(is_master=False)
        number = store.add("orders", 1)
        store.set(f"order/{number}", json.dumps(vars(order)))
        return Start(self, order, store, number)

    def follow(self, run: Callable[[Order], Ending]) -> None:
        """On the other nodes: does what the first one orders, until that is over.

        Args:
            run: runs torchrun for an order and returns what its processes said of their end.

        Raises:
            RuntimeError: if the first node's command is gone.
        """
        try:
            store = self._store(is_master=False)
            for number in itertools.count(1):
                while not store.check([f"order/{number}"]):
                    time.sleep(0.5)
                text = store.get(f"order/{number}").decode()
                if not text:
                    store.set(f"left/{self.rank}", "")
                    return
                ending = run(Order(**json.loads(text)))
                store.set(f"ended/{number}/{self.rank}", json.dumps(ending))
        except Exception as error:  # torch's own errors, which have no common class
            raise RuntimeError(
                f"node {self.rank} lost the first node's command ({type(error).__name__})"
            ) from error

    def _have_left(self, store: Any) -> bool:
        return store.check([f"left/{rank}" for rank in range(1, self.count)])

    def _store(self, *, is_master: bool) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        return TCPStore(
            self.host, self.port, is_master=is_master, timeout=_GATHER, wait_for_workers=False
        )


@dataclass(frozen=True)
class Start:
    """A job that was started on all nodes, as the first one sees it."""

    nodes: Nodes
    order: Order
    store: Any = None
    number: int = 0

    def has_failed_elsewhere(self) -> bool:
        """Whether the processes of another node have ended, and not well."""
        return any(self._endings().values())

    def wait_elsewhere(self, seconds: float) -> list[Ending]:
        """How the processes of the other nodes ended; waits for them once those here have ended."""
        deadline = time.monotonic() + seconds
        others = range(1, self.nodes.count)
        while len(endings := self._endings()) < len(others) and time.monotonic() < deadline:
            time.sleep(0.2)
        silent: Ending = {"ended": "a node did not say how its processes ended"}
        return [endings.get(rank, silent) for rank in others]

    def _endings(self) -> dict[int, Ending]:
        """Of the nodes whose processes have ended."""
        keys = {rank: f"ended/{self.number}/{rank}" for rank in range(1, self.nodes.count)}
        return {
            rank: json.loads(self.store.get(key))
            for rank, key in keys.items()
            if self.store.check([key])
        }
