"""torchrun whose stores listen on the network of its job alone, and take no state without its key.

    python -m nemo_rod.run.processes.agent OPTIONS OF TORCHRUN

torch's own listen on every address, and unpickle what anyone has written into them.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from nemo_rod.trust import KEY, sign, verify


def guard(address: str, key: str) -> None:
    """Binds the stores of this process to an address, and signs the nodes' state with a key."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

    def store(host_name: str, port: int, is_master: bool = False, **options: Any) -> Any:
        if is_master:
            family = socket.getaddrinfo(address, port)[0][0]
            with suppress(OSError):  # this process serves the port already
                listener = socket.create_server((address, port), family=family, backlog=2048)
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
        return TCPStore(host_name, port, is_master=is_master, **options)

    def dumps(state: Any) -> bytes:
        return sign(pickle.dumps(state), key)

    def loads(data: bytes) -> Any:
        if (state := verify(data, key)) is None:
            raise pickle.PickleError("the state of the nodes is not of this job")
        return pickle.loads(state)

    backend: Any = c10d_rendezvous_backend
    backend.TCPStore = store
    rendezvous: Any = dynamic_rendezvous
    rendezvous.pickle = SimpleNamespace(dumps=dumps, loads=loads, PickleError=pickle.PickleError)
    rendezvous.DynamicRendezvousHandler._create_tcp_store_server = lambda _, host, port: store(
        host, port, is_master=True, multi_tenant=True
    )


def guard_for(options: list[str]) -> None:
    """Calls `guard` with the address in torchrun's options, and the key in the environment."""
    addresses = [word.partition("=")[2] for word in options if word.startswith("--local-addr=")]
    guard(addresses[0], os.environ.get(KEY) or secrets.token_hex(16))


if __name__ == "__main__":
    from torch.distributed.run import main

    guard_for(sys.argv)
    main()
