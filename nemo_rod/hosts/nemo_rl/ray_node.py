"""Runs Ray on a node of a NeMo-RL stage without ray.sub, and the stage on the first node.

    python -m nemo_rod.hosts.nemo_rl.ray_node COMMAND [ARGUMENT...]

Slurm's variables identify the node; those of `stage.sh` hold the address of the first one and the
key of its Ray. The exit status is that of the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

# Ports of a job's Ray, relative to its first one, by their names in NeMo-RL's ray.sub. The two
# groups of a node's own ports keep the first node and the others apart.
HEAD_PORTS = {"PORT": 0, "RAY_CLIENT_SERVER_PORT": 1, "DASHBOARD_PORT": 2}
METRIC_PORTS = {"AUTOSCALER_METRIC_PORT": 3, "DASHBOARD_METRIC_PORT": 4}  # Ray's own names
NODE_PORTS = {
    "NODE_MANAGER_PORT": 5,
    "OBJECT_MANAGER_PORT": 7,
    "RUNTIME_ENV_AGENT_PORT": 9,
    "DASHBOARD_AGENT_GRPC_PORT": 11,
    "METRICS_EXPORT_PORT": 13,
    "DASHBOARD_AGENT_LISTEN_PORT": 15,
}
WORKER_PORTS = (20, 199)
# Below the ports that Linux hands out, and apart from those on which the nodes of other jobs meet.
FIRST_PORT, PORTS_PER_JOB, JOBS = 10_000, 200, 50
OBJECT_STORE_BYTES = 8 << 30  # ids and losses need little
OBJECT_STORE = "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"
_MAX_CPUS = 32  # each may get a process, and a process takes two ports
_JOIN_SECONDS = 600.0
_STARTS = 3  # Ray gives up after 30 s; ray.sub starts it as often


def first_port(job: int) -> int:
    """Returns the first of the ports of a job's Ray."""
    return FIRST_PORT + job % JOBS * PORTS_PER_JOB


def ray_options(environment: Mapping[str, str]) -> list[str]:
    """Returns the options of `ray start` on this node, by the variables of Slurm and `stage.sh`."""
    base, head = first_port(int(environment["SLURM_JOB_ID"])), _is_first(environment)
    low, high = WORKER_PORTS
    half = (high - low + 1) // 2
    low += 0 if head else half
    options = {
        "num-cpus": min(int(environment.get("SLURM_CPUS_PER_TASK", _MAX_CPUS)), _MAX_CPUS),
        "min-worker-port": base + low,
        "max-worker-port": base + low + half - 1,
        **{
            name.lower().replace("_", "-"): base + offset + head
            for name, offset in NODE_PORTS.items()
        },
    }
    words = ["--block", "--disable-usage-stats"]
    if head:
        words += ["--head", f"--node-ip-address={_head(environment)}", f"--port={base}"]
        words += ["--include-dashboard=false"]
        options["ray-client-server-port"] = base + HEAD_PORTS["RAY_CLIENT_SERVER_PORT"]
    else:
        words += [f"--address={_head(environment)}:{base}"]
    return words + [f"--{name}={value}" for name, value in options.items()]


def ray_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of Ray and of its drivers, which need the key to use it."""
    base = first_port(int(environment["SLURM_JOB_ID"]))
    return {
        **{name: str(base + offset) for name, offset in METRIC_PORTS.items()},
        **environment,
        "RAY_ADDRESS": f"{_head(environment)}:{base}",
        OBJECT_STORE: environment.get(OBJECT_STORE, str(OBJECT_STORE_BYTES)),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": environment.get("NEMO_ROD_KEY") or secrets.token_hex(16),
    }


def main(command: Sequence[str]) -> int:
    """Runs Ray on this node, and on the first one the command; returns its status."""
    environment = ray_environment(os.environ)
    expected = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    adopt_orphans()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it would end Ray before the stage has saved
    address, first = environment["RAY_ADDRESS"], _is_first(environment)
    if not first:
        _wait(lambda: _listens(address), f"there is no Ray at {address}")
    ray = _Ray(command[0], environment)
    try:
        if first:
            _wait(lambda: ray.has_nodes(expected), f"not all {expected} nodes joined Ray")
            return _run(command, environment)
        while _listens(address):  # until the first node's Ray has ended
            ray.keep_starting()
            time.sleep(2)
        return 0
    finally:
        ray.end()


class _Ray:
    """This node's Ray, of one Python."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._python, self._environment = python, environment
        self._starts = 0
        self._start()

    def _start(self) -> None:
        command = [self._python, "-P", "-m", "ray.scripts.scripts", "start"]
        # it refuses to start with the address that its drivers need
        own = {k: v for k, v in self._environment.items() if k != "RAY_ADDRESS"}
        self._starts += 1
        self._process = subprocess.Popen(
            [*command, *ray_options(self._environment)], env=own, stdout=sys.stderr
        )

    def has_nodes(self, expected: int) -> bool:
        """Returns whether so many nodes have joined.

        Raises:
            RuntimeError: Ray has ended as often as it may.
        """
        self.keep_starting()
        program = (
            "import ray; ray.init(log_to_driver=False, logging_level='error'); "
            "print('nodes', sum(node['Alive'] for node in ray.nodes()))"
        )
        done = subprocess.run(
            [self._python, "-P", "-W", "ignore", "-c", program],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        return f"nodes {expected}\n" in done.stdout

    def keep_starting(self) -> None:
        """Starts it again if it has ended too early.

        Raises:
            RuntimeError: the process has ended as often as it may.
        """
        if self._process.poll() is not None:
            if self._starts == _STARTS:
                raise RuntimeError(f"Ray ended {_STARTS} times before the stage began: see above.")
            self._start()

    def end(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        kill_children()  # an agent of a raylet that was killed waits a minute for Ray's head


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the stage and forwards signals to it, since not every Slurm signals all processes."""
    # the other nodes run Ray alone: with these the command would count on them
    leading = ("NEMO_ROD_HEAD", "NEMO_ROD_KEY", "SLURM_STEP_NUM_TASKS")
    stage = subprocess.Popen(
        command,
        env={name: value for name, value in environment.items() if name not in leading},
        preexec_fn=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    )

    def forward(number: int, _: FrameType | None) -> None:
        stage.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, forward)
    status = stage.wait()
    return status if status >= 0 else 128 - status


def adopt_orphans() -> None:
    """Asks Linux to make this process the parent of descendants whose own parents end."""
    set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def kill_children() -> None:
    """Kills every child of this process, and those that it adopts from them, until none is left."""
    while True:
        children: list[int] = []
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                children += map(int, (thread / "children").read_text().split())
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _wait(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + _JOIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{failure} within {_JOIN_SECONDS:g} s: see the logs of the nodes.")
        time.sleep(1)


def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10):
        return True
    return False


def _is_first(environment: Mapping[str, str]) -> bool:
    return environment.get("SLURM_NODEID", "0") == "0"


def _head(environment: Mapping[str, str]) -> str:
    """Returns the first node's address; a single node needs no network."""
    return environment.get("NEMO_ROD_HEAD", "127.0.0.1:").rpartition(":")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
