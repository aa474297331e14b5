"""Containers of Apptainer and Ray's ports: what is rendered, and what is refused."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from command_line import composed
from places import ROOT

from nemo_rod.config import Config
from nemo_rod.hosts.nemo_rl import ray_node
from nemo_rod.hosts.nemo_rl.on_slurm import RayOnSlurm
from nemo_rod.run.launch import slurm
from nemo_rod.run.launch.slurm import Slurm
from nemo_rod.run.processes.nodes import Nodes
from nemo_rod.run.stages import Stages

CLUSTER = [
    "recipe=toy_synthetic", "cluster=b200_8", "cluster.account=science", "cluster.partition=batch",
    "cluster.image=/shared/nemo_rod.sif", "cluster.container=apptainer",
    "cluster.mounts=[/shared/data:/data]", "+cluster.env.TRITON_CACHE_DIR=/local/triton",
]  # fmt: skip
RAY_SUB = ("launcher=ray", "cluster.container=pyxis", "launcher.nemo_rl=/shared/RL")


def configured(*overrides: str) -> Config:
    return composed(*CLUSTER, *overrides)


def rendered(*overrides: str) -> dict[str, str]:
    config = configured(*overrides)
    launcher = RayOnSlurm() if config.launcher.kind == "ray" else Slurm()
    return launcher.render(config, Stages(config).all())


def test_apptainer_runs_what_the_documents_promise():
    files = rendered("launcher=slurm")
    assert "container-" not in files["stage.sh"]
    here, run = Path.cwd(), Path.cwd() / "runs" / "toy_synthetic"
    binds = [f"{run}:{run}", f"{here}:{here}", "/shared/data:/data"]
    options = ["--pid", "--writable-tmpfs", "--no-mount", "tmp", "--nv", "--pwd", str(here)]
    options += [word for bind in binds for word in ("--bind", bind)]
    (words,) = re.findall(r"^options=\((.*)\)$", files["container.sh"], re.MULTILINE)
    assert shlex.split(words) == options
    folder = run / "launch" / "slurm"
    command = (
        f"command=(bash {folder}/container.sh bash {folder}/node.sh python3 -P -m nemo_rod.cli "
    )
    assert command in files["rod.sbatch"]
    page = (ROOT / "docs" / "clusters.md").read_text()
    cells = re.findall(r"^\|[^|]*\|[^|]*\| (`--.*) \|$", page, re.MULTILINE)
    promised = set(re.findall(r"`(--[\w-]+)`", " ".join(cells)))
    script = files["container.sh"]
    assert promised == {word for word in re.findall(r"--[\w-]+", script) if word != "--tmp"}


def test_caches_are_on_the_node_unless_the_cluster_says_otherwise():
    node = slurm.render_node(configured("launcher=slurm"))
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", node, re.MULTILINE))
    assert exported["TRITON_CACHE_DIR"] == "/local/triton"
    assert exported["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/")
    assert "HF_HOME" not in exported  # models are fetched once, for all jobs
    pyxis = slurm.render_node(configured("launcher=slurm", "cluster.container=pyxis"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in pyxis


def test_nemo_rl_stages_start_ray_themselves_in_apptainer():
    files = rendered("launcher=ray")
    assert not [name for name in files if name.startswith("ray.")]
    (command,) = re.findall(r"^command=.*$", files["rod.sbatch"], re.MULTILINE)
    assert (
        " python3 -P -m nemo_rod.hosts.nemo_rl.ray_node python3 -P -m nemo_rod.cli train "
        in command
    )
    assert command.endswith(" launcher.kind=nemo_rl)")
    assert "ray_node" not in files["prepare.sbatch"]


def test_ray_sub_gets_ports_that_no_other_job_has():
    script = rendered(*RAY_SUB)["ray.sbatch"]
    offsets = dict(re.findall(r"^export (\w+)=\$\{\1:-\$\(\(base \+ (\d+)\)\)\}$", script, re.M))
    ports = {**ray_node.HEAD_PORTS, **ray_node.METRIC_PORTS, **ray_node.NODE_PORTS}
    assert offsets.keys() == {*ports, "MIN_WORKER_PORT", "MAX_WORKER_PORT"}
    assert len({*offsets.values()}) == len(offsets)
    assert "\nray_sub=/shared/RL/ray.sub\n" in script


def test_ray_sub_gets_the_cores_and_the_memory_of_the_node():
    for overrides, words in (
        ([], ["CPUS_PER_WORKER=112", "--mem=0"]),
        (["+cluster.env.CPUS_PER_WORKER='64'", "+cluster.sbatch.mem=900G"],
         ["CPUS_PER_WORKER=64", "--mem=900G"]),
        # nobody has said how many cores there are
        (["cluster.cpu_cores=1", "+cluster.sbatch.mem-per-gpu=100G"], ["--mem-per-gpu=100G"]),
    ):  # fmt: skip
        script = rendered(*RAY_SUB, *overrides)["rod.sh"]
        assert re.findall(r"CPUS_PER_WORKER=\w+|--mem\S+", script) == words


def slurm_job(number: int, node: int = 0) -> dict[str, str]:
    head = "10.0.0.1:20001"
    return {"SLURM_JOB_ID": str(number), "SLURM_NODEID": str(node), "NEMO_ROD_HEAD": head}


def ports_of(number: int, node: int) -> set[int]:
    """All ports on which a node's Ray may listen."""
    options = dict(
        word.removeprefix("--").split("=", 1)
        for word in ray_node.ray_options(slurm_job(number, node))
        if "=" in word
    )
    low, high = int(options["min-worker-port"]), int(options["max-worker-port"])
    single = {int(v) for k, v in options.items() if k.endswith("port") and "-worker-" not in k}
    assert len(single) == len(ray_node.NODE_PORTS) + 2 * (node == 0)
    return single | set(range(low, high + 1))


def test_ports_of_jobs_and_of_nodes_differ():
    ports = [ports_of(number, node) for number in (7, 8, 49, 50) for node in (0, 1)]
    for one, other in itertools.combinations(ports, 2):
        assert not one & other
    assert min(map(min, ports)) >= 10_000 and max(map(max, ports)) < 20_000
    assert ports_of(7, 0) == ports_of(57, 0)  # fifty jobs at a time


def test_ray_listens_for_its_own_job_alone():
    alone = ray_node.ray_options({"SLURM_JOB_ID": "7"})
    assert "--node-ip-address=127.0.0.1" in alone and "--include-dashboard=false" in alone
    assert "--address=10.0.0.1:11400" in ray_node.ray_options(slurm_job(7, 1))
    variables = ray_node.ray_environment({**slurm_job(7), "NEMO_ROD_KEY": "secret"})
    assert variables["RAY_ADDRESS"] == "10.0.0.1:11400"
    assert variables["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] == str(8 << 30)
    # Ray's metrics, too, which were on the same two ports in every job
    assert {variables[name] for name in ray_node.METRIC_PORTS} == {"11403", "11404"}
    assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN"]) == ("token", "secret")


def test_a_stage_on_ray_does_not_wait_for_commands_of_other_nodes(tmp_path):
    """The other nodes run Ray alone; `Nodes.from_environment` would count on them."""
    program = (
        "import pathlib, sys; from nemo_rod.run.processes.nodes import Nodes; "
        "pathlib.Path(sys.argv[1]).write_text(repr(Nodes.from_environment()))"
    )
    own = {"NEMO_ROD_KEY": "secret", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **slurm_job(7), **own}
    start = "import os, sys; from nemo_rod.hosts.nemo_rl.ray_node import _run, ray_environment; "
    start += "sys.exit(_run(sys.argv[1:], ray_environment(os.environ)))"
    command = [sys.executable, "-c", program, str(tmp_path / "nodes")]
    subprocess.run([sys.executable, "-c", start, *command], env=environment, check=True)
    assert (tmp_path / "nodes").read_text() == repr(Nodes())
