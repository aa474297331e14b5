"""A command on several nodes: the first one leads, the others follow.

Every node of a Slurm job starts the same command. Only the first node runs the stage. Whenever it
starts torchrun, it orders the others, through a small key-value store, to start theirs, and they
report the end of their processes.

    order/<n>        an order, or the end of the stage
    ended/<n>/<node> the end of a node's processes
    left/<node>      a follower has finished
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# How the processes of a node ended: messages by kind; empty on success.
Ending = dict[str, str]

_GATHER = timedelta(minutes=30)  # containers may be slow to start
_LEAVE = timedelta(seconds=30)


@dataclass(frozen=True)
class Order:
    """One start of torchrun on all nodes.

    Attributes:
        job_file: argument of `python -m nemo_rod.megatron`.
        log: log of the first node; the others append their number.
        world_size: total number of processes.
        port: rendezvous port on the first node.
    """

    job_file: str
    log: str
    world_size: int
    port: int


@dataclass(frozen=True)
class Nodes:
    """The nodes of this command.

    Attributes:
        count: number of nodes.
        rank: index of this node; 0 leads.
        host: address of the first node.
        port: port of the store on the first node.
        key: secret of the job, which keeps others on the network from giving orders.
    """

    count: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""

    @classmethod
    def of_this_job(cls) -> Nodes:
        """Returns the nodes given by the job script and Slurm; one node outside such a job.

        Raises:
            ValueError: if the job's secret is missing.
        """
        if "NEMO_ROD_HEAD" not in os.environ:
            return cls()
        if not os.environ.get("NEMO_ROD_KEY"):
            raise ValueError(
                "NEMO_ROD_HEAD is set without NEMO_ROD_KEY: submit the run again, its job script "
                "is of another version."
            )
        host, port = os.environ["NEMO_ROD_HEAD"].rsplit(":", 1)
        return cls(
            count=int(os.environ["SLURM_NTASKS"]),
            rank=int(os.environ["SLURM_PROCID"]),
            host=host,
            port=int(port),
            key=os.environ["NEMO_ROD_KEY"],
        )

    @contextmanager
    def led(self) -> Iterator[None]:
        """On the first node, wraps the whole command: the others follow until it is over."""
        if self.count == 1:
            yield
            return
        store = self._store(is_master=True)
        patience = _LEAVE  # after a failure, Slurm ends the others with this command
        try:
            yield
            patience = _GATHER  # some may not have started yet
        finally:
            store.set(f"order/{store.add('orders', 1)}", "")
            deadline = time.monotonic() + patience.total_seconds()
            keys = [f"left/{rank}" for rank in range(1, self.count)]
            while not store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.2)

    def start(self, order: Order) -> Start:
        """On the first node, makes all others start torchrun for a job."""
        if self.count == 1:
            return Start(self, order)
        store = self._store()
        number = store.add("orders", 1)
        store.set(f"order/{number}", json.dumps(vars(order)))
        return Start(self, order, store, number)

    def follow(self, run: Callable[[Order], Ending]) -> None:
        """On the other nodes, executes the first one's orders until it is done.

        Args:
            run: runs torchrun for an order and returns its ending.

        Raises:
            RuntimeError: if the first node's command is lost.
        """
        try:
            store = self._store()
            for number in itertools.count(1):
                while not store.check([f"order/{number}"]):
                    time.sleep(0.5)
                text = store.get(f"order/{number}").decode()
                if not text:
                    store.set(f"left/{self.rank}", "")
                    return
                ending = run(Order(**json.loads(text)))
                store.set(f"ended/{number}/{self.rank}", json.dumps(ending))
        except Exception as error:  # torch's errors have no common class
            raise RuntimeError(
                f"node {self.rank} lost the first node's command ({type(error).__name__})"
            ) from error

    def _store(self, *, is_master: bool = False) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        listening = _listen(self.host, self.port) if is_master else None
        store = TCPStore(
            self.host,
            self.port,
            is_master=is_master,
            timeout=_GATHER,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        return PrefixStore(self.key, store)


def _listen(host: str, port: int) -> int | None:
    """Returns a socket that listens on the job's address alone.

    None means a store that listens on every address, protected by the key: where the node does not
    have the address by which Slurm knows it, or resolves its own name to loopback, which no other
    node can reach.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if host != address[0] and ipaddress.ip_address(address[0]).is_loopback:
        print(f"{host} is loopback on this node: listening on all of its addresses", flush=True)
        return None
    try:
        return socket.create_server(address[:2], family=family, backlog=4096).detach()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        print(f"{host} is no address of this node: listening on all of its addresses", flush=True)
        return None


@dataclass(frozen=True)
class Start:
    """A job started on all nodes, as seen from the first."""

    nodes: Nodes
    order: Order
    store: Any = None
    number: int = 0

    def has_failed_elsewhere(self) -> bool:
        """Returns whether the processes of another node have failed."""
        return any(self._endings().values())

    def wait_elsewhere(self, seconds: float) -> list[Ending]:
        """Waits until the other nodes' processes have ended and returns their endings."""
        deadline = time.monotonic() + seconds
        others = range(1, self.nodes.count)
        while len(endings := self._endings()) < len(others) and time.monotonic() < deadline:
            time.sleep(0.2)
        unknown: Ending = {"ended": "a node did not report the end of its processes"}
        return [endings.get(rank, unknown) for rank in others]

    def _endings(self) -> dict[int, Ending]:
        """Returns the endings of the nodes that are done, by rank."""
        keys = {rank: f"ended/{self.number}/{rank}" for rank in range(1, self.nodes.count)}
        return {
            rank: json.loads(self.store.get(key))
            for rank, key in keys.items()
            if self.store.check([key])
        }
