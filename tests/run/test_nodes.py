"""One job on several nodes is one torchrun: they meet, and all end together.

Nodes are told apart by environment variables alone, so two of them fit on this machine.
"""

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from places import ROOT
from test_faults import Run
from tiny import LAYOUTS

from nemo_rod import jobs
from nemo_rod.config import Launcher
from nemo_rod.run.processes import pythons, torchrun
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.trust import sign


def variables(folder: Path, rank: int, port: int = 21234) -> dict[str, str]:
    """What the job script and Slurm give the command of a node."""
    head = {"NEMO_ROD_HEAD": f"127.0.0.1:{port}", "NEMO_ROD_PEER": "127.0.0.1"}
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_JOB_ID": "7"}
    own = {"NEMO_ROD_RECORD": str(folder / "rod.jsonl"), "NEMO_ROD_KEY": "of this job"}
    return {**head, **slurm, **own}


def two(folder: Path) -> list[Nodes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        Nodes(2, rank, port=port, record=folder / "rod.jsonl", attempt="7.0") for rank in (0, 1)
    ]


def test_outside_a_job_there_is_one_node(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")  # such as in a user's own allocation
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.delenv("NEMO_ROD_HEAD", raising=False)
    assert Nodes.from_environment() == Nodes()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # --export=NONE once made a leader of each
    with pytest.raises(ValueError, match="one of 2 tasks of a Slurm step, and NEMO_ROD_HEAD is"):
        Nodes.from_environment()
    for name, value in variables(tmp_path, 1).items():
        monkeypatch.setenv(name, value)
    assert Nodes.from_environment() == Nodes(
        2, 1, port=21234, record=tmp_path / "rod.jsonl", attempt="7.0"
    )


def test_nodes_meet_on_the_network_between_them(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert Nodes().environment() == {"GLOO_SOCKET_IFNAME": "lo"}
    (lo,) = [
        n for n, addresses in psutil.net_if_addrs().items() if addresses[0].address == "127.0.0.1"
    ]
    first, second = Nodes(2, 0, port=5, attempt="7.1"), Nodes(2, 1, port=5, attempt="7.1")
    assert first.environment() == {jobs.STORE: "127.0.0.1:5", "GLOO_SOCKET_IFNAME": lo}
    assert first.torchrun_options() == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=7.1", "--rdzv-endpoint=127.0.0.1:5"),
        *("--rdzv-conf=is_host=1,join_timeout=1800", "--local-addr=127.0.0.1"),
    ]
    assert "--rdzv-conf=is_host=0,join_timeout=1800" in second.torchrun_options()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in second.environment()
    sentence = r"no way to nowhere\.invalid, the NodeAddr of another node"
    with pytest.raises(ValueError, match=sentence):
        Nodes(2, 1, head="nowhere.invalid", port=5).address()


@pytest.mark.parametrize("fails", [False, True])
def test_follower_of_a_stage_without_a_job_just_leaves(tmp_path, fails):
    first, second = two(tmp_path)
    (tmp_path / "rod.over").write_text("6.0")  # of an earlier job
    log = tmp_path / "log"
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(torchrun.follow, second, world_size=2, launcher=Launcher(), log=log)
        try:
            with first.announcing_end():
                assert not follower.done()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        follower.result(timeout=60)
    assert not log.exists()


def test_follower_whose_processes_fail_lets_the_first_node_speak(tmp_path, monkeypatch):
    from torch.distributed import TCPStore

    first, second = two(tmp_path)
    monkeypatch.setattr(torchrun, "torchrun", lambda *_: ["sh", "-c", "exit 3"])
    job = {"world_size": 2, "log": tmp_path / "log"}
    store = TCPStore(first.head, first.port, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match=r"node 1: exit status 3 \(log: "):
        torchrun.follow(second, **job, launcher=Launcher(grace_seconds=1))

    def lead() -> bytes:
        with first.announcing_end():
            return jobs.job_store(f"{first.head}:{first.port}", "7.0").get(jobs.FAULT_KEY)

    with ThreadPoolExecutor(1) as pool:
        fault = pool.submit(lead)
        # no error: Slurm would end the first node's command
        torchrun.follow(second, **job, launcher=Launcher())
    assert fault.result() == b"node 1: exit status 3"
    del store


def test_a_folder_that_nodes_do_not_share_is_named(tmp_path, monkeypatch):
    from torch.distributed import HashStore

    monkeypatch.setattr(jobs, "_SHARED_SECONDS", 0.0)
    for name, value in variables(tmp_path, 1).items():
        monkeypatch.setenv(name, value)
    store, file = HashStore(), str(tmp_path / "job.json").encode()
    store.set("job", sign(file, "of this job"))
    with pytest.raises(ValueError) as error:
        jobs.shared_job(store, [])
    assert str(error.value).endswith(
        f"does not see {tmp_path}/job.json, which the first node has written: put run_dir on a "
        "file system that all nodes share"
    )


def test_tuned_kernels_stay_with_the_run(tmp_path, monkeypatch):
    kept = tmp_path / "kernels"
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for gpu, keep, expected in (
        (False, True, []),
        (True, False, []),
        (True, True, ["one.autotune.json"]),
    ):
        monkeypatch.setattr(torchrun, "sees_gpu", lambda gpu=gpu: gpu)
        with torchrun.tuned_kernels(kept, keep=keep) as variables:
            assert bool(variables) == gpu
            if gpu:
                (Path(variables["TRITON_CACHE_DIR"]) / "folder").mkdir()
                made = Path(variables["TRITON_CACHE_DIR"]) / "folder"
                (made / "one.autotune.json").write_text("tuned")
                (made / "one.so").write_text("code, which another may have put there")
        assert [file.name for file in kept.rglob("one*")] == expected
    with torchrun.tuned_kernels(kept, keep=True) as variables:
        picks = Path(variables["TRITON_CACHE_DIR"]) / "folder" / "one.autotune.json"
        assert picks.read_text() == "tuned"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    with torchrun.tuned_kernels(kept, keep=True) as variables:
        assert variables == {}


def test_models_run_where_megatron_is(tmp_path, monkeypatch):
    """NeMo-RL's image has Megatron in the environment of its workers alone."""
    python = tmp_path / pythons.MEGATRON_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "workers: $*"\n')
    python.chmod(0o755)
    for variable, has_megatron, chosen in (
        (None, False, sys.executable),
        (tmp_path, True, sys.executable),
        (tmp_path / "none", False, sys.executable),
        (tmp_path, False, str(python)),
    ):
        monkeypatch.delenv("NEMO_RL_VENV_DIR", raising=False)
        if variable is not None:
            monkeypatch.setenv("NEMO_RL_VENV_DIR", str(variable))
        monkeypatch.setattr(pythons, "can_be_found", lambda module, has=has_megatron: has)
        assert torchrun.torchrun(Nodes(), 2, Launcher())[0] == chosen
    bound = torchrun.torchrun(Nodes(), 2, Launcher(numa_binding="node"))
    assert "--numa-binding=node" in bound[: bound.index("nemo_rod.megatron")]
    torchrun.run_job(tmp_path / "job", world_size=2, launcher=Launcher(), log=tmp_path / "log")
    assert (tmp_path / "log").read_text().startswith("workers: -P -m nemo_rod.run.processes.agent")


HELPER = """
import multiprocessing, os, signal, time
from nemo_rod.signals import keep_signals_from_helpers
received = []
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
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
    while not received and time.monotonic() < deadline:
        time.sleep(0.01)
    assert received
"""


def test_helpers_of_a_rank_do_not_hear_that_it_is_to_stop(tmp_path):
    (tmp_path / "rank.py").write_text(HELPER)
    done = subprocess.run([sys.executable, str(tmp_path / "rank.py")], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


LISTENS = """
import os, psutil, torch.distributed as d
d.init_process_group("gloo")
d.barrier()
agent = psutil.Process(os.getppid())
for process in (agent, psutil.Process()):
    for c in process.net_connections():
        if c.status == "LISTEN":
            print("LISTENS", c.laddr.ip, c.laddr.port, flush=True)
d.barrier()
"""


@pytest.mark.parametrize("is_fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stores_of_a_job_on_one_node_listen_on_loopback(tmp_path, monkeypatch, is_fork):
    (tmp_path / "listens.py").write_text(LISTENS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    command = torchrun.torchrun(Nodes(), 2, Launcher())
    if not is_fork:
        command.insert(1, "-u")
    command[command.index("nemo_rod.megatron")] = "listens"
    log = tmp_path / "logs" / "log"
    assert torchrun.run_process(command, log, Launcher(), variables=Nodes().environment()) == {}
    listening = re.findall(r"LISTENS (\S+) \d+", log.read_text())
    assert len(listening) >= 2 and {*listening} == {"127.0.0.1"}, log.read_text()


@pytest.fixture
def two_nodes(tiny, request):
    """A RoD run of two replicas, one on each of two nodes, that has done some steps."""
    out = tiny.root / f"nodes_{request.node.name}"
    job, port = tiny.rod_job(out, LAYOUTS["dp2"], launcher__stall_seconds=15), two(out)[0].port
    nodes = [Run(job, **variables(out, rank, port)) for rank in range(2)]
    for node in nodes:
        node.reach(3)
    yield nodes
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()


def endings(nodes: list[Run]) -> list[tuple[int, str]]:
    """Exit status and last words of each node's command."""
    output = [node.process.communicate(timeout=100)[1] for node in nodes]
    return [(node.process.returncode, text) for node, text in zip(nodes, output, strict=True)]


@pytest.mark.slow
def test_killed_rank_of_another_node_is_named(two_nodes):
    (rank,) = two_nodes[1].ranks
    rank.kill()
    (first, output), (second, _) = endings(two_nodes)
    assert (first, second) == (1, 0)
    assert re.search(r"rank [01]: was ended by SIGKILL", output)  # torchrun numbers them
    assert not psutil.wait_procs(two_nodes[0].ranks, timeout=10)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_everywhere_at_once_saves(two_nodes, number):
    """As Slurm does it: every process of every node gets the signal."""
    for command in [psutil.Process(node.process.pid) for node in two_nodes]:
        for member in [*command.children(recursive=True), command]:
            member.send_signal(number)
    assert "was asked to stop and has saved: run it again" in endings(two_nodes)[0][1]
    assert (two_nodes[0].out / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
