"""The nodes of a stage: each starts the stage's command, and the first one runs the stage.

A job of the first node is one torchrun on all nodes, which meet at the first node's address.
Another node's command waits for a job, starts its own part of it, and exits once the first node's
command has ended, which then writes a file beside the stage's log.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_rod.files import write_whole
from nemo_rod.jobs import FAULT_KEY, STORE, job_store

_JOIN_SECONDS = 1800  # how long nodes wait for each other: containers start slowly


@dataclass(frozen=True)
class Nodes:
    """The nodes of this command.

    Attributes:
        count: number of nodes.
        rank: index of this node; 0 runs the stage.
        head: address of the first node.
        port: port on the first node where the nodes meet.
        peer: address of the last node.
        record: log of the stage.
        attempt: name of this start of the stage, the same on all nodes.
    """

    count: int = 1
    rank: int = 0
    head: str = "127.0.0.1"
    port: int = 0
    peer: str = "127.0.0.1"
    record: Path = Path()
    attempt: str = ""

    @classmethod
    def from_environment(cls) -> Nodes:
        """Returns the nodes given by the job script and Slurm; one node outside such a job.

        Raises:
            ValueError: this is one of several tasks that cannot find each other.
        """
        environ = os.environ
        if "NEMO_ROD_HEAD" not in environ:
            if (tasks := environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
                raise ValueError(
                    f"This is one of {tasks} tasks of a Slurm step, and NEMO_ROD_HEAD is not in "
                    "its environment, so that each task would run the whole command: submit it "
                    "with launcher=slurm, or start one task."
                )
            return cls()
        host, port = environ["NEMO_ROD_HEAD"].rsplit(":", 1)
        return cls(
            count=int(environ["SLURM_NTASKS"]),
            rank=int(environ["SLURM_PROCID"]),
            head=host,
            port=int(port),
            peer=environ["NEMO_ROD_PEER"],
            record=Path(environ["NEMO_ROD_RECORD"]),
            attempt=f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}",
        )

    def torchrun_options(self) -> list[str]:
        """Returns the options of torchrun by which the nodes meet; their names need not resolve."""
        if self.count == 1:
            return ["--standalone", "--local-addr=127.0.0.1"]
        own = self.address()
        conf = {"is_host": int(self.rank == 0), "join_timeout": _JOIN_SECONDS}
        return [
            *(f"--nnodes={self.count}", "--rdzv-backend=c10d", f"--rdzv-id={self.attempt}"),
            f"--rdzv-endpoint={self.head if self.rank else own}:{self.port}",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}",
            f"--local-addr={own}",
        ]

    def environment(self) -> dict[str, str]:
        """Returns the variables by which the processes of several nodes find each other.

        Gloo would bind to the address that the node's own name resolves to, which may be loopback
        or nothing at all.
        """
        if self.count == 1:
            return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        variables = {STORE: f"{self.head if self.rank else self.address()}:{self.port}"}
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            import psutil

            own = self.address()
            for name, addresses in psutil.net_if_addrs().items():
                if any(own == address.address.partition("%")[0] for address in addresses):
                    variables["GLOO_SOCKET_IFNAME"] = name
        return variables

    def address(self) -> str:
        """Returns the address of this node on the network that leads to the others.

        Raises:
            ValueError: no network leads to them.
        """
        other = self.head if self.rank else self.peer
        try:
            family, kind, _, _, target = socket.getaddrinfo(
                other, self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(
                f"Node {socket.gethostname()} has no way to {other}, the NodeAddr of another node "
                f"of this job ({error}): set NodeAddr in slurm.conf to an address that all nodes "
                "reach."
            ) from None

    @contextmanager
    def announcing_end(self) -> Iterator[None]:
        """On the first node, announces the end of the command to the others."""
        try:
            yield
        finally:
            if self.count > 1:
                write_whole(self._mark, self.attempt.encode())

    @property
    def _mark(self) -> Path:
        return self.record.with_suffix(".over")

    def is_over(self) -> bool:
        """Returns whether the first node's command is over."""
        with suppress(OSError):
            return self._mark.read_text() == self.attempt
        return False

    def wait_for_start(self) -> bool:
        """Waits until the first node starts torchrun; returns False if its command ends instead."""
        while not self.is_over():
            with suppress(OSError), socket.create_connection((self.head, self.port), timeout=10):
                return True
            time.sleep(0.5)
        return False

    def wait_for_end(self, seconds: float) -> bool:
        """Waits for the end of the first node's command, and returns whether it came in time."""
        deadline = time.monotonic() + seconds
        while not (over := self.is_over()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return over

    def declare(self, fault: str) -> None:
        """Ends the ranks of all nodes, which name the fault."""
        with suppress(Exception):  # torch's errors have no common class; they may have ended
            store = job_store(f"{self.head}:{self.port}", self.attempt, seconds=10)
            store.compare_set(FAULT_KEY, "", fault)
