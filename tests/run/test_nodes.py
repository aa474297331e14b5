"""One job on several nodes: the first node leads, the others follow, and all end together.

Nodes are told apart by environment variables alone, so two of them fit on this machine.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_faults import is_rank, wait_for_step
from tiny import LAYOUTS, Setting

from nemo_rod.config import Launcher
from nemo_rod.run.processes.nodes import Ending, Nodes, Order
from nemo_rod.run.processes.torchrun import free_port, run_torchrun

ORDERS = [Order("one.json", "one.log", 2, 1), Order("two.json", "two.log", 2, 2)]


@pytest.fixture
def nodes() -> list[Nodes]:
    first = Nodes(count=2, rank=0, host="127.0.0.1", port=free_port())
    return [first, dataclasses.replace(first, rank=1)]


@contextmanager
def led(
    first: Nodes, second: Nodes, run: Callable[[Order], Ending] = lambda order: {}
) -> Iterator[Future[None]]:
    """Leads one follower, which must leave once its leader has."""
    with ThreadPoolExecutor(1) as pool:
        with first.led():
            follower = pool.submit(second.follow, run)
            yield follower
        follower.result(timeout=60)


def test_outside_a_job_there_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")  # such as in a user's own allocation
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.delenv("NEMO_ROD_HEAD", raising=False)
    assert Nodes.of_this_job() == Nodes(count=1, rank=0)
    monkeypatch.setenv("NEMO_ROD_HEAD", "10.1.2.3:21234")
    with pytest.raises(ValueError, match="without NEMO_ROD_KEY: submit the run again"):
        Nodes.of_this_job()
    monkeypatch.setenv("NEMO_ROD_KEY", "secret")
    assert Nodes.of_this_job() == Nodes(4, 3, host="10.1.2.3", port=21234, key="secret")


def test_orders_without_the_key_are_not_heard(nodes: list[Nodes]) -> None:
    from torch.distributed import TCPStore

    first, second = (dataclasses.replace(node, key="secret") for node in nodes)
    done: list[Order] = []

    def run(order: Order) -> Ending:
        done.append(order)
        return {}

    with ThreadPoolExecutor(1) as pool, first.led():
        stranger = TCPStore(first.host, first.port, is_master=False, wait_for_workers=False)
        stranger.set("order/1", '{"job_file": "evil", "log": "", "world_size": 2, "port": 1}')
        follower = pool.submit(second.follow, run)
        assert first.start(ORDERS[0]).wait_elsewhere(60) == [{}]
    follower.result(timeout=60)
    assert done == ORDERS[:1]


def test_only_the_address_of_the_job_answers(nodes: list[Nodes]) -> None:
    first = dataclasses.replace(nodes[0], host="127.0.0.2")
    with led(first, dataclasses.replace(first, rank=1)):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", first.port), timeout=5)
        assert first.start(ORDERS[0]).wait_elsewhere(60) == [{}]


def test_a_node_that_takes_its_own_name_for_loopback_answers_elsewhere(
    nodes: list[Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Debian's `127.0.1.1 head` in /etc/hosts, which other nodes do not have."""
    resolve = socket.getaddrinfo

    def on_the_head(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.1.1" if host == "localhost" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", on_the_head)
    first = dataclasses.replace(nodes[0], host="localhost")
    second = dataclasses.replace(nodes[1], host="127.0.0.3")  # stands for the head's real address
    with led(first, second):
        socket.create_connection((second.host, second.port), timeout=5).close()
        assert first.start(ORDERS[0]).wait_elsewhere(60) == [{}]


def test_followers_do_every_order_and_say_how_it_ended(nodes: list[Nodes]) -> None:
    done: list[Order] = []

    def run(order: Order) -> Ending:
        done.append(order)
        return {} if order.job_file == "one.json" else {"error": "rank 1: no"}

    with led(*nodes, run) as follower:
        starts = [nodes[0].start(order) for order in ORDERS]
        assert [start.wait_elsewhere(60) for start in starts] == [[{}], [{"error": "rank 1: no"}]]
        assert [start.has_failed_elsewhere() for start in starts] == [False, True]
        assert not follower.done()
    assert done == ORDERS


def test_a_folder_that_nodes_do_not_share_is_named(
    nodes: list[Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rod.run.processes.torchrun._SHARED_SECONDS", 0.0)
    order = Order(str(tmp_path / "job.json"), str(tmp_path / "log"), 2, 1)
    said = run_torchrun(order, nodes[1], Launcher())
    assert said["error"].endswith(
        f"does not see {tmp_path}/job.json, which the first node has written: put run_dir on a "
        "file system that all nodes share"
    )


def test_follower_of_a_stage_without_a_job_just_leaves(nodes: list[Nodes]) -> None:
    with led(*nodes):
        pass


def test_silent_node_is_not_waited_for_for_ever(nodes: list[Nodes]) -> None:
    release = threading.Event()
    with led(*nodes, lambda order: {"error": str(release.wait(60))}):
        start = nodes[0].start(ORDERS[0])
        assert start.wait_elsewhere(0.5) == [
            {"ended": "a node did not report the end of its processes"}
        ]
        release.set()


def test_follower_whose_leader_is_gone_says_so(nodes: list[Nodes]) -> None:
    program = (
        "import time; from nemo_rod.run.processes.nodes import Nodes, Order\n"
        f"nodes = Nodes(count=2, port={nodes[0].port})\n"
        "with nodes.led(): nodes.start(Order('job', 'log', 2, 1)); time.sleep(100)"
    )
    leader = subprocess.Popen([sys.executable, "-c", program])

    def run(order: Order) -> Ending:
        leader.kill()
        leader.wait(60)
        return {}

    with pytest.raises(RuntimeError, match="node 1 lost the first node's command"):
        nodes[1].follow(run)


HELPER = """
import multiprocessing, os, signal, time
from nemo_rod.signals import keep_signals_from_helpers
heard = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    keep_signals_from_helpers()
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        ours, theirs = context.Pipe()
        helper = context.Process(target=theirs.send, args=("written",))
        helper.start()
        os.kill(helper.pid, signal.SIGTERM)
        assert ours.recv() == "written"
        helper.join()
        assert helper.exitcode == 0
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard
"""


def test_helpers_of_a_rank_do_not_hear_that_it_is_to_stop(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(HELPER)
    done = subprocess.run([sys.executable, str(tmp_path / "rank.py")], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


PROGRAM = """
import sys
from pathlib import Path
from nemo_rod.config import Launcher
from nemo_rod.signals import Stopped
from nemo_rod.run.processes.torchrun import run_job, run_torchrun
from nemo_rod.run.processes.nodes import Nodes
nodes, launcher = Nodes.of_this_job(), Launcher(grace_seconds=60)
if nodes.rank:
    nodes.follow(lambda order: run_torchrun(order, nodes, launcher))
    sys.exit()
try:
    with nodes.led():
        run_job(Path(sys.argv[1]), world_size=2, launcher=launcher, log=Path(sys.argv[2]))
except (RuntimeError, Stopped) as error:
    sys.exit(str(error))
"""


class TwoNodes:
    """A RoD run of two replicas, one on each of two nodes."""

    def __init__(self, tiny: Setting, name: str) -> None:
        self.out = tiny.root / name
        job = tiny.rod_job(self.out, LAYOUTS["dp2"], stall_seconds=15)
        head = {"NEMO_ROD_HEAD": f"127.0.0.1:{free_port()}", "NEMO_ROD_KEY": "secret"}
        shared = {**head, "SLURM_NTASKS": "2"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(job), str(self.out / "log")],
                env={**os.environ, **shared, "SLURM_PROCID": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def reach(self, step: int) -> None:
        wait_for_step(self.out, step, self.processes[0])

    def ranks(self, node: int) -> list[psutil.Process]:
        return list(filter(is_rank, psutil.Process(self.processes[node].pid).children(True)))

    def endings(self) -> list[tuple[int, str]]:
        """Exit status and last words of each node's command."""
        said = [process.communicate(timeout=100)[1] for process in self.processes]
        return [(p.returncode, text) for p, text in zip(self.processes, said, strict=True)]


@pytest.fixture
def two_nodes(tiny: Setting, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    run = TwoNodes(tiny, f"nodes_{request.node.name}")
    yield run
    for process in run.processes:
        if process.poll() is None:
            process.kill()


@pytest.mark.slow
def test_killed_rank_of_another_node_is_named(two_nodes: TwoNodes) -> None:
    two_nodes.reach(3)
    (rank,) = two_nodes.ranks(node=1)
    others = two_nodes.ranks(node=0)
    rank.kill()
    (first, said), (second, _) = two_nodes.endings()
    assert (first, second) == (1, 0)
    assert "rank 1: was ended by SIGKILL" in said
    assert not psutil.wait_procs(others, timeout=10)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_everywhere_at_once_saves(two_nodes: TwoNodes, number: int) -> None:
    """As Slurm does it: every process of every node gets the signal."""
    two_nodes.reach(3)
    for process in two_nodes.processes:
        for member in [*psutil.Process(process.pid).children(True), psutil.Process(process.pid)]:
            member.send_signal(number)
    said = two_nodes.endings()[0][1]
    assert "was asked to stop and has saved: run it again" in said
    assert (two_nodes.out / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
