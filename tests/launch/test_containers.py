"""Containers of Apptainer and Ray's ports: what is rendered, and what is refused."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
from command_line import composed
from places import ROOT

from nemo_rod.config import Config
from nemo_rod.launch import containers, ray, ray_node, slurm
from nemo_rod.launch.submit import submit
from nemo_rod.recipe.stages import Stages

CLUSTER = [
    "recipe=toy_synthetic",
    "cluster=b200_8",
    "cluster.account=science",
    "cluster.partition=batch",
    "cluster.image=/shared/nemo_rod.sif",
    "cluster.container=apptainer",
    "cluster.mounts=[/shared/data:/data]",
    "+cluster.env.TRITON_CACHE_DIR=/local/triton",
]


def configured(*overrides: str) -> Config:
    return composed(*CLUSTER, *overrides)


def words(script: str) -> list[str]:
    """The options of `apptainer exec` that a rendered script starts with."""
    (line,) = re.findall(r"^options=\((.*)\)$", script, re.MULTILINE)
    return shlex.split(line)


def test_apptainer_runs_what_the_documents_promise() -> None:
    config = configured("launcher=slurm")
    files = slurm.render(config, Stages(config).all())
    assert "container-" not in files["stage.sh"]
    here, run = Path.cwd(), Path(config.run_dir).absolute()
    binds = [f"{run}:{run}", f"{here}:{here}", "/shared/data:/data"]
    options = ["--pid", "--writable-tmpfs", "--no-mount", "tmp", "--nv", "--pwd", str(here)]
    assert words(files["container.sh"]) == [*options, *(w for b in binds for w in ("--bind", b))]
    folder = run / "launch" / "slurm"
    command = f"command=(bash {folder}/container.sh bash {folder}/node.sh python3 -m nemo_rod.cli "
    assert command in files["rod.sbatch"]
    page = (ROOT / "docs" / "clusters.md").read_text()
    promised = set(re.findall(r"^\| `(--[\w-]+)`[^|]*\| [^|]*Apptainer", page, re.MULTILINE))
    script = files["container.sh"]
    assert promised == {word for word in re.findall(r"--[\w-]+", script) if word != "--tmp"}


def test_caches_are_on_the_node_unless_the_cluster_says_otherwise() -> None:
    node = slurm.render_node(configured("launcher=slurm"))
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", node, re.MULTILINE))
    assert exported["TRITON_CACHE_DIR"] == "/local/triton"
    assert exported["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/")
    assert "HF_HOME" not in exported  # models are fetched once, for all jobs
    pyxis = slurm.render_node(configured("launcher=slurm", "cluster.container=pyxis"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in pyxis


def test_without_an_image_nothing_starts_a_container() -> None:
    config = configured("launcher=slurm", "cluster.image=null")
    assert "container.sh" not in slurm.render(config, Stages(config).all())
    assert containers.pyxis_options(config) == {}


def test_nemo_rl_stages_start_ray_themselves_in_apptainer() -> None:
    config = configured("launcher=ray")
    files = ray.render(config, Stages(config).all())
    assert not [name for name in files if name.startswith("ray.")]
    (command,) = re.findall(r"^command=.*$", files["rod.sbatch"], re.MULTILINE)
    assert " python3 -m nemo_rod.launch.ray_node python3 -m nemo_rod.cli train " in command
    assert command.endswith(" launcher.kind=nemo_rl)")
    assert "ray_node" not in files["prepare.sbatch"]


def test_ray_sub_gets_ports_that_no_other_job_has() -> None:
    config = configured("launcher=ray", "cluster.container=pyxis", "launcher.nemo_rl=/shared/RL")
    script = ray.render(config, Stages(config).all())["ray.sbatch"]
    offsets = dict(re.findall(r"^export (\w+)=\$\{\1:-\$\(\(base \+ (\d+)\)\)\}$", script, re.M))
    ports = {**ray_node.HEAD_PORTS, **ray_node.METRIC_PORTS, **ray_node.NODE_PORTS}
    assert offsets.keys() == {*ports, "MIN_WORKER_PORT", "MAX_WORKER_PORT"}
    assert len({*offsets.values()}) == len(offsets)
    assert script.rstrip().endswith("exec bash /shared/RL/ray.sub")


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


def test_ports_of_jobs_and_of_nodes_differ() -> None:
    found = [ports_of(number, node) for number in (7, 8, 49, 50) for node in (0, 1)]
    for one, other in itertools.combinations(found, 2):
        assert not one & other
    assert min(map(min, found)) >= 10_000 and max(map(max, found)) < 20_000
    assert ports_of(7, 0) == ports_of(57, 0)  # fifty jobs at a time


def test_ray_listens_for_its_own_job_alone() -> None:
    alone = ray_node.ray_options({"SLURM_JOB_ID": "7"})
    assert "--node-ip-address=127.0.0.1" in alone and "--include-dashboard=false" in alone
    assert "--address=10.0.0.1:11400" in ray_node.ray_options(slurm_job(7, 1))
    variables = ray_node.ray_environment({**slurm_job(7), "NEMO_ROD_KEY": "secret"})
    assert variables["RAY_ADDRESS"] == "10.0.0.1:11400"
    assert variables["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] == str(8 << 30)
    # Ray's metrics, too, which were on the same two ports in every job
    assert {variables[name] for name in ray_node.METRIC_PORTS} == {"11403", "11404"}
    assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN"]) == ("token", "secret")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("cluster.image=nemo_rod.sif", "cluster.image=nemo_rod.sif is no whole path"),
        ("cluster.image=docker://a/b", "cluster.image=docker://a/b is no whole path"),
        ("cluster.container=docker", "expected pyxis or apptainer"),
    ],
)
def test_what_apptainer_cannot_start_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config = configured("launcher=slurm", "dry_run=true", override)
        submit(config, Stages(config).all(), slurm.render)
