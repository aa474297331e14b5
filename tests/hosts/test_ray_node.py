"""Real Ray, started as the nodes of a Slurm job start it: `nemo_rod.hosts.nemo_rl.ray_node`.

Two nodes on loopback, which tell them apart by their ports alone. Tasks of a real Ray tokenise
text, too: the blocks are those of one process.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from command_line import composed
from corpus_cases import tree
from nemo_rl_runs import PATIENCE
from places import ROOT
from split_texts import sources_of, write_texts

from nemo_rod.config import Config, Domain
from nemo_rod.hosts.nemo_rl import ray_node
from nemo_rod.run.stages import Stages

pytestmark = pytest.mark.nemo_rl

JOB, KEY = 4, "a key of this job alone, of some length"
STAGE = """
import pathlib, ray, sys, time
ray.init(log_to_driver=False)
place = pathlib.Path(sys.argv[1])
(place / "nodes").write_text(str(sum(node["Alive"] for node in ray.nodes())))
memory = ray.cluster_resources()["object_store_memory"]
(place / "store").write_text(str(memory))
(place / "up").touch()
while not (place / "go").exists():
    time.sleep(0.2)
sys.exit(75)
"""


def environment(folder: Path, node: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder),
        "RAY_worker_register_timeout_seconds": "900", "SLURM_JOB_ID": str(JOB),
        "SLURM_NODEID": str(node), "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1",
        "NEMO_ROD_HEAD": "127.0.0.1:20004", "NEMO_ROD_KEY": KEY,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path_factory):
    """A folder with a short path: Ray's sockets lie below it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rn", ignore_cleanup_errors=True) as made:
        yield Path(made)


def test_two_nodes_serve_their_job_alone_and_leave_nothing(folder):
    program = [sys.executable, "-W", "ignore", "-c", STAGE, str(folder)]
    command = [sys.executable, "-m", "nemo_rod.hosts.nemo_rl.ray_node", *program]
    with open(folder / "log", "w") as log:
        nodes = [
            subprocess.Popen(command, env=environment(folder, node), stdout=log, stderr=log)
            for node in (0, 1)
        ]
    family = Family(nodes)
    try:
        family.wait_for(folder / "up")
        assert (folder / "nodes").read_text() == "2"
        assert float((folder / "store").read_text()) <= 2 * ray_node.OBJECT_STORE_BYTES
        first = ray_node.first_port(JOB)
        mine = range(first, first + ray_node.PORTS_PER_JOB)
        strangers = [place for place in family.listening() if place[1] not in mine]
        assert [place for place in strangers if place[0] not in ("127.0.0.1", "::1")] == []
        assert not usable(folder, key="another key, of some length as well")
        assert usable(folder, key=KEY)
        (folder / "go").touch()
        assert [node.wait(PATIENCE) for node in nodes] == [75, 0], (folder / "log").read_text()
        family.wait_for_the_end()
    finally:
        family.kill()


def usable(folder: Path, *, key: str) -> bool:
    """Whether a program with this key can use the job's Ray."""
    ask = "import ray; ray.init(log_to_driver=False); print('nodes', len(ray.nodes()))"
    variables = ray_node.ray_environment({**environment(folder, 0), "NEMO_ROD_KEY": key})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ask], env=variables, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    return "nodes 2" in done.stdout


class Family:
    """The processes of some nodes, also those whose parents have ended."""

    def __init__(self, started: list[subprocess.Popen]) -> None:
        self._started = started
        self.nodes = [psutil.Process(node.pid) for node in started]
        self.seen: set[psutil.Process] = set(self.nodes)

    def look(self) -> None:
        for node in [*self.seen]:
            try:
                self.seen.update(node.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[psutil.Process]:
        self.look()
        return [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while not file.exists():
            self.look()
            ended = [node.poll() for node in self._started]
            late = time.monotonic() > deadline or ended != [None, None]
            log = (file.parent / "log").read_text()[-5000:]
            assert not late, f"the stage did not begin:\n{log}"
            time.sleep(0.5)

    def wait_for_the_end(self) -> None:
        deadline = time.monotonic() + 60
        while left := self.alive():
            assert time.monotonic() < deadline, left
            time.sleep(0.5)

    def listening(self) -> list[tuple[str, int]]:
        """Addresses and ports on which the processes listen."""
        return [
            (c.laddr.ip, c.laddr.port)
            for process in self.alive()
            for c in process.net_connections(kind="tcp")
            if c.status == psutil.CONN_LISTEN
        ]

    def kill(self) -> None:
        for process in self.alive():
            process.kill()


@pytest.fixture(scope="module")
def ray_here():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(Path(os.environ["TMPDIR"]) / "ray")  # its logs


def recipe_of(texts: Path, *words: str) -> Config:
    config = composed("recipe=toy_synthetic", *words)
    config.domain = Domain(tokenizer="byte", block_size=64, sources=sources_of(texts))
    return config


def prepared(config: Config) -> dict[str, str]:
    for stage in Stages(config).all():
        if "prepare" in (stage.name, stage.feeds):
            stage.run()
    return tree(Path(config.run_dir) / "blocks")


def test_tasks_of_ray_share_the_text(ray_here, tmp_path):
    texts = write_texts(tmp_path / "texts", 900)
    expected = prepared(recipe_of(texts, f"run_dir={tmp_path}/one"))
    killed = 0
    for count in (1, 2, 5):
        words = [f"run_dir={tmp_path}/{count}", "launcher=nemo_rl", f"prepare.nodes={count}"]
        over = threading.Event()

        def kill_workers(over: threading.Event = over) -> None:
            """Ends a process that works on a task, now and then, as a node's failure does."""
            nonlocal killed
            while not over.wait(0.4) and killed < 12:
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "ray::rod_task" in " ".join(process.cmdline()):
                            process.kill()
                            killed += 1

        killer = threading.Thread(target=kill_workers)
        killer.start()
        try:
            made = prepared(recipe_of(texts, *words))
        finally:
            over.set()
            killer.join()
        assert made == expected
    print(f"{killed} kills")


def test_a_task_of_ray_names_its_file(ray_here, tmp_path):
    texts = write_texts(tmp_path / "texts")
    with (texts / "f5.jsonl").open("a") as file:
        file.write('{"text": \n')
    words = [f"run_dir={tmp_path}/run", "launcher=nemo_rl", "prepare.nodes=2"]
    with pytest.raises(ValueError, match=r"task \d of 2: source old: .*f5\.jsonl:\d+: not a line"):
        prepared(recipe_of(texts, *words))
