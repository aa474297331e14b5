"""What launchers render: the same files as ever, sound shell, and the whole configuration.

`UPDATE_GOLDEN=1 make test ARGS="-k test_render"` writes tests/golden/launch/ anew; read the diff.
"""

import contextlib
import copy
import dataclasses
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from command_line import composed, nemo_rod
from places import GOLDEN, ROOT

from nemo_rod.config import Cluster, Config
from nemo_rod.hosts.nemo_rl import on_slurm as ray
from nemo_rod.hosts.nemo_rl.on_slurm import RayOnSlurm
from nemo_rod.lab.launches import read_launch
from nemo_rod.run.checks import check
from nemo_rod.run.launch import slurm
from nemo_rod.run.launch.local import Local
from nemo_rod.run.launch.queue import read_jobs
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.launch.slurm import Slurm
from nemo_rod.run.stages import Stages

RENDERED = GOLDEN / "launch"
READ = ("toy", "german_nemotron_nano_12b_v2")  # whose files are compared whole; one has many nodes
# of one process and of many, of one GPU and of nodes, with seeds, mixtures and arms of all kinds
RECIPES = (
    *(*READ, "toy_paper", "toy_mixture", "toy_generated"),
    *("german_qwen3_0_6b", "legal_qwen3_5_9b"),
)
RENDER = {"local": Local().render, "slurm": Slurm().render, "ray": RayOnSlurm().render}
CLUSTER = [
    "cluster=b200_8", "cluster.account=science", "cluster.partition=batch",
    "cluster.cpu_partition=cpu", "cluster.image=/shared/nemo_rod.sqsh",
    "cluster.mounts=[/shared/data:/data]", "+cluster.sbatch={constraint: b200, reservation: null}",
    "+cluster.env.HF_HOME=/shared/huggingface", "launcher.nemo_rl=/shared/RL",
]  # fmt: skip


# these have arms that NeMo-RL cannot train: blends that follow the model, or until they converge
FEW = ["base", "no_replay", "rod"]
ON_RAY = {
    "toy": ["base", "no_replay", "fixed_32", "merge_0.6", "rod"],
    **{f"toy_{name}": FEW for name in ("paper", "generated")},
}


@cache
def launched(recipe: str, launcher: str, *overrides: str) -> Config:
    if launcher == "slurm":
        return composed(f"recipe={recipe}", "launcher=slurm", *CLUSTER, *overrides)
    config = launched(recipe, "slurm", *overrides)
    own = composed("recipe=toy_synthetic", f"launcher={launcher}", *CLUSTER).launcher
    arms = ON_RAY.get(recipe, config.arms) if launcher == "ray" else config.arms
    config = dataclasses.replace(config, launcher=own, arms=arms)  # nothing else depends on it
    check(config)
    return config


@cache
def rendered(recipe: str, launcher: str, *overrides: str) -> Mapping[str, str]:
    """The files of a whole run, with this machine's folder replaced."""
    config = launched(recipe, launcher, *overrides)
    files = RENDER[launcher](config, Stages(config).all())
    return {name: text.replace(str(Path.cwd()), "/shared/project") for name, text in files.items()}


@pytest.fixture(autouse=True, scope="module")
def in_a_folder_of_its_own(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("renders")):
        yield


@pytest.mark.parametrize("launcher", RENDER)
def test_files_are_as_ever(launcher):
    # left out: what is told elsewhere, or by a test of its own
    package = [*slurm.REQUEUE, ray.RAY if launcher == "ray" else slurm.STAGE]
    of_package, files = "\n".join(part.read_text() for part in package), {}
    for recipe in READ:
        known = rendered(recipe, "slurm") if launcher == "ray" else {}
        for name, text in rendered(recipe, launcher).items():
            is_known = text.replace("/launch/ray", "/launch/slurm") == known.get(name)
            if name != "config.yaml" and not is_known:
                files[f"{recipe}/{name}"] = text.replace(of_package, "")
    text = told_once(files)
    golden = RENDERED / f"{launcher}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.exists(), f"{golden} is missing; see the head of this file"
    assert text == golden.read_text()
    assert {file.stem for file in RENDERED.iterdir()} == {*RENDER}


def told_once(files: Mapping[str, str]) -> str:
    """All files in one text; of one much like another before it, the lines in which they differ."""
    parts, told = [], dict[str, list[str]]()
    for name, text in files.items():
        lines, names = text.splitlines(), recipe_and_stage(name)
        shortest, like = lines, ""
        for other, expected in told.items():
            for old, new in zip(recipe_and_stage(other), names, strict=True):
                expected = [re.sub(rf"\b{re.escape(old)}\b", new, line) for line in expected]
            changes = [*difflib.unified_diff(expected, lines, n=0, lineterm="")][2:]
            if len(changes) < len(shortest):
                shortest, like = changes, f": {other} of this name{', but' * bool(changes)}"
        parts += [f"=== {name}{like}", *shortest, ""]
        told[name] = lines
    return "\n".join(parts)


def recipe_and_stage(file: str) -> list[str]:
    return file.rsplit(".", 1)[0].split("/")


@pytest.mark.parametrize("launcher", RENDER)
def test_shell_is_sound(launcher, tmp_path):
    scripts: dict[str, Path] = {}  # of those that differ in names and numbers alone, one
    for recipe in RECIPES:
        for name, text in rendered(recipe, launcher).items():
            if name.endswith((".sh", ".sbatch")):
                script = scripts.setdefault(re.sub(r"\w+", "word", text), tmp_path / recipe / name)
                script.parent.mkdir(exist_ok=True)
                script.write_text(text)
    check_shell([*scripts.values()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_job_asks_for_the_processes_of_its_layout(recipe):
    config, files = launched(recipe, "slurm"), rendered(recipe, "slurm")
    for name in (name for name in config.arms if f"{name}.sbatch" in files):
        asked = directives(files[f"{name}.sbatch"])
        if "gpus-per-node" in asked:
            gpus = int(asked["nodes"]) * int(asked["gpus-per-node"])
            assert gpus == config.parallel.world_size, name
        else:
            assert name == "base" or name.startswith("merge_"), name


def check_shell(scripts: Sequence[Path]) -> None:
    assert scripts
    loop = 'for script; do bash -n "$script" || exit 1; done'
    subprocess.run(["bash", "-c", loop, "bash", *map(str, scripts)], check=True)
    here = shutil.which("shellcheck", path=Path(sys.executable).parent)
    program = here or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: make venv")
    # a job script sets `command` for stage.sh, which is looked at by itself
    command = [program, "--exclude=SC1091,SC2034", *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_configuration_is_the_whole_one(recipe):
    config = copy.deepcopy(launched(recipe, "slurm"))
    config.train.steps, config.seed, config.rebuild = 7, 3, ["prepare"]
    setup = [
        "export PATH=/opt/x/bin:${PATH}", r"echo \${A.b} \\${c:d} ${", "${oc.env:HOME}", "$HOME",
    ]  # fmt: skip
    config.cluster.setup = setup  # what `\${...}` in a recipe stands for
    write_files(launch_folder(config), Slurm().render(config, Stages(config).all()))
    launcher, frozen = read_launch(Path(config.run_dir))
    assert launcher == "slurm"
    # a job runs its own stage, takes it up again where it was, and knows where it is
    assert (frozen.launcher.kind, frozen.rebuild) == ("local", [])
    assert frozen.run_dir == str(Path.cwd() / config.run_dir)
    frozen.launcher.kind, frozen.rebuild, frozen.run_dir = "slurm", ["prepare"], config.run_dir
    defaults = Cluster()  # of jobs alone: never read back
    for key in ("setup", "python", "env", "image", "mounts", "sbatch", "cpu_sbatch"):
        setattr(config.cluster, key, getattr(defaults, key))
    config.launcher.nemo_rl = None
    assert frozen == config


def test_the_latest_launch_is_the_last_one_by_any_clock(tmp_path):
    for past, launcher in enumerate(("slurm", "local", "slurm"), start=1):
        config = launched("toy", launcher, f"run_dir={tmp_path}", f"seed={past}")
        files = Local().render(config, []) | {"jobs.tsv": f"rod\t{past}\n"}
        write_files(launch_folder(config), files)
        for file in launch_folder(config).iterdir():
            os.utime(file, (-past, -past))
        assert (read_launch(tmp_path)[1].seed, [*read_jobs(tmp_path)][-1]) == (past, str(past))


def test_frozen_configuration_starts_a_command(tmp_path):
    config = launched("toy_synthetic", "local", "domain.block_size=32", f"run_dir={tmp_path}/run")
    write_files(launch_folder(config), Local().render(config, Stages(config).all()))
    (line,) = re.findall(
        r"nemo_rod\.cli (prepare .*)", (launch_folder(config) / "run.sh").read_text()
    )
    done = nemo_rod(*line.split(), "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/run/blocks" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["run"]  # Hydra left nothing


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_job_comes_after_what_it_needs(recipe):
    lines = re.findall(r"^submit (\S+)(.*)$", rendered(recipe, "slurm")["submit.sh"], re.MULTILINE)
    before: set[str] = set()
    for name, needs in lines:
        assert set(needs.split()) <= before
        assert bool(needs) == (name != "prepare")
        before.add(name)
    *_, (name, needs), (last, _) = [line for line in lines if line[0] != "controls"]
    assert (name, last) == ("evaluate", "report")
    assert set(needs.split()) == {"base", *launched(recipe, "slurm").arms}


def directives(job: str) -> dict[str, str]:
    """Options of a job script, by name."""
    options = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", job, re.MULTILINE)
    return {name: value for name, value in options}


def test_nodes_and_gpus_follow_the_layout():
    whole = rendered(
        "toy", "slurm", "parallel.data=16", "train.batch_size=256", "pretrain=null",
        "model.hf=a/model", "model.architecture=null",
    )  # fmt: skip
    rod = directives(whole["rod.sbatch"])
    assert (rod["nodes"], rod["gpus-per-node"], rod["cpus-per-task"]) == ("2", "8", "112")
    assert "exclusive" in rod and rod["mem"] == "0"
    assert (rod["partition"], rod["signal"], rod["open-mode"]) == ("batch", "B:USR1@300", "append")
    assert rod["reservation"] == ""  # an option without a value
    merge = directives(whole["merge_0.2.sbatch"])
    assert (merge["nodes"], merge["partition"], merge["mem"]) == ("1", "cpu", "64G")
    assert not {"gpus-per-node", "exclusive"} & set(merge)
    # a base that is only fetched needs no GPU either
    assert "gpus-per-node" not in directives(whole["base.sbatch"])

    part = directives(rendered("toy", "slurm", "cluster.gpu_option=gres")["rod.sbatch"])
    assert (part["nodes"], part["gres"], part["cpus-per-task"]) == ("1", "gpu:2", "28")
    assert "exclusive" not in part


OF_THE_CLUSTER = {  # its own options of sbatch -> how a job on two of the eight GPUs has them
    "mem=900G": "mem=900G gpus-per-node=2 cpus-per-task=28",
    "mem-per-gpu=90G": "mem-per-gpu=90G gpus-per-node=2 cpus-per-task=28",
    "cpus-per-task=4": "cpus-per-task=4 gpus-per-node=2 mem=500G",
    "gpus-per-node=b200:2": "gpus-per-node=b200:2 cpus-per-task=28 mem=500G",
    "gres=gpu:b200:2": "gres=gpu:b200:2 cpus-per-task=28 mem=500G",
    "gres=nvme:1": "gres='gpu:2,nvme:1' cpus-per-task=28 mem=500G",
    "gres=gpumem:80g": "gres='gpu:2,gpumem:80g' cpus-per-task=28 mem=500G",
    r"comment='a\b'": r"comment='a\\b' gpus-per-node=2 cpus-per-task=28 mem=500G",
}


@pytest.mark.parametrize("word", OF_THE_CLUSTER)
def test_options_of_the_cluster_override_ours(word):
    gres = ["cluster.gpu_option=gres"] if word.startswith("gres") else []
    job = rendered("toy_synthetic", "slurm", *gres, f"+cluster.sbatch.{word}")["rod.sbatch"]
    found = re.findall(r"^#SBATCH --((?:mem|gres|gpus|cpus|comment).*)", job, re.MULTILINE)
    assert " ".join(found) == OF_THE_CLUSTER[word]


def srun_options(stage: str) -> dict[str, str]:
    """Options of the srun that every job starts, by name."""
    (block,) = re.findall(r"^srun_options=\(\n(.*?)^\)", stage, re.MULTILINE | re.DOTALL)
    words = [line.strip().removeprefix("--").partition("=") for line in block.splitlines()]
    return {name: value.strip("'") for name, _, value in words}


def test_jobs_run_in_the_container_that_the_documents_promise():
    files = rendered("toy", "slurm")
    options = srun_options(files["stage.sh"])
    here = "/shared/project"
    assert options["container-image"] == "/shared/nemo_rod.sqsh"
    assert options["container-mounts"].split(",") == [
        f"{here}/runs/toy:{here}/runs/toy",
        f"{here}:{here}",
        "/shared/data:/data",
    ]
    assert options["container-workdir"] == here
    assert options["no-container-mount-home"] == ""
    assert " python3 -P -m nemo_rod.cli train " in files["rod.sbatch"]  # the image's
    other = rendered("toy", "slurm", "cluster.python=/opt/other/bin/python3")["rod.sbatch"]
    assert " /opt/other/bin/python3 -P -m nemo_rod.cli train " in other
    page = (ROOT / "docs" / "clusters.md").read_text()
    promised = set(re.findall(r"^\|[^|]*\| `--([\w-]*container[\w-]*)`", page, re.MULTILINE))
    assert promised == {name for name in options if "container" in name}


@pytest.mark.parametrize(("cluster", "count"), [("h100_8", 1), ("h200_8", 1), ("b200_8", 32)])
def test_tensor_parallelism_has_the_connections_it_overlaps_with(cluster, count):
    """Megatron's overlap of tensor parallelism relies on one on Hopper."""
    files = rendered("toy", "slurm", f"cluster={cluster}", "cluster.image=null")
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={count}\n" in files["node.sh"]


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
def test_without_an_image_jobs_run_the_python_that_submits(container):
    files = rendered("toy", "slurm", "cluster.image=null", f"cluster.container={container}")
    assert "container.sh" not in files
    assert not [name for name in srun_options(files["stage.sh"]) if "container" in name]
    assert f" {sys.executable} -P -m nemo_rod.cli train " in files["rod.sbatch"]


def test_secrets_stay_references_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET123")
    config = composed(
        *("recipe=toy", "launcher=slurm", *CLUSTER, f"run_dir={tmp_path}"),
        "+cluster.env.TOKEN=${oc.env:HF_TOKEN}",
    )
    files = Slurm().render(config, Stages(config).all())
    assert not [name for name, text in files.items() if "SECRET" in text]
    write_files(launch_folder(config), files)
    assert {file.stat().st_mode & 0o777 for file in launch_folder(config).iterdir()} == {0o600}
    monkeypatch.delenv("HF_TOKEN")  # a job of somebody else's, or a look from elsewhere
    assert "TOKEN: ${oc.env:HF_TOKEN}" in (launch_folder(config) / "config.yaml").read_text()
    for value, state in (("hf_SECRET123", "is set"), (None, "is not set: HF_TOKEN is not in")):
        environment = {"PATH": "/usr/bin:/bin", **({"HF_TOKEN": value} if value else {})}
        command = ["bash", str(launch_folder(config) / "node.sh"), "printenv", "TOKEN"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == (value or "")
        assert f"cluster.env.TOKEN {state}" in done.stderr
        assert "SECRET" not in done.stderr


def test_references_are_resolved_once():
    word = r"cluster.setup=['export PATH=/opt/x/bin:\${PATH}','\${A.b}','${recipe}']"
    assert composed("recipe=toy_synthetic", word).cluster.setup == [
        "export PATH=/opt/x/bin:${PATH}", "${A.b}", "toy_synthetic",
    ]  # fmt: skip
