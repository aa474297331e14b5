"""Launchers that render their stages as Slurm jobs and submit them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from operator import mul
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.layout import check_nodes
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of, queue
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.stages import Stages
from nemo_rod.trust import REFERENCE

_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")  # sbatch takes one of them
_OF_GPUS = ("gres", "gpus-per-node", "tres-per-node")
_OF_CLUSTER = ("account", "partition", "qos", "time")  # which has keys for them
_OWN_OPTIONS = {  # sbatch option -> why no cluster file sets it, and what to do
    "cpus-per-gpu": "sbatch refuses it beside the cores of a stage: remove it, and set "
    "cluster.cpu_cores",
    "dependency": "a stage comes after those that it needs: remove it",
    "chdir": "the jobs work in the folder that they are submitted from: remove it, and go there",
    **dict.fromkeys(
        ("wait", "wrap", "test-only"),
        "submit.sh submits a script of its own and reads the number of its job: remove it",
    ),
    "output": "nemo-rod recognises its jobs by their log: remove it, and read run_dir/logs/slurm",
    "open-mode": "a job that is queued again goes on in its log: remove it",
    "signal": "it warns a stage of its time limit: remove it, and set launcher.grace_seconds",
    **dict.fromkeys(
        ("gpus", "gpus-per-task", "gpus-per-socket", "ntasks-per-gpu", "tres-per-task"),
        "the GPUs of a stage follow from its layout: remove it, and set cluster.gpus_per_node",
    ),
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "array", "het-group"),
        "a stage is one job with as many nodes as its layout fills: remove it, and set parallel",
    ),
}


def submit(stages: Stages, chosen: list[Stage]) -> None:
    """Renders the unfinished ones of some stages and, without `dry_run`, submits them.

    Raises:
        ValueError: the cluster's configuration is invalid, Slurm is missing, or an earlier
            launch is still running.
    """
    config = stages.config
    _check_cluster(config)
    folder = launch_folder(config)
    check_idle(config)
    if not config.dry_run and shutil.which("sbatch") is None:
        raise ValueError(
            f"launcher={config.launcher.kind} needs sbatch, which is not on this machine: run it "
            "on a login node, or add dry_run=true to render the files alone."
        )
    known = {stage.name: stage for stage in stages.all()}
    pending: dict[str, Stage] = {}
    for stage in chosen:
        rebuilt = stage.name in config.rebuild
        for need in stage.needs:
            if need not in pending and need in known and not known[need].is_there():
                raise ValueError(
                    f"{stage.name} needs {need}, which is not there yet: run `nemo-rod "
                    f"{stages.results.command(known[need].command)}` first."
                )
        if rebuilt or any(need in pending for need in stage.needs) or not stage.is_done():
            pending[stage.name] = stage
        if rebuilt and not config.dry_run:
            stage.move_aside()
    write_files(folder, stages.launcher.render(config, list(pending.values())))
    submit = ["bash", str(folder / "submit.sh")]
    if config.dry_run:
        _say(f"{len(pending)} jobs rendered, none submitted: {shlex.join(submit)}")
        return
    done = subprocess.run(submit, stderr=subprocess.PIPE, text=True)
    if done.stderr.strip() and not done.returncode:
        _say(done.stderr.rstrip())
    if done.returncode:
        raise ValueError(f"Slurm refused the chain: {done.stderr.strip()}")
    jobs = {
        number: job
        for number, job in queue.read_jobs(Path(config.run_dir)).items()
        if job.launcher == config.launcher.kind
    }
    for number, job in jobs.items():
        _say(f"{number:>10}  {pending[job.stage].title}")
    _say(f"Submitted {len(jobs)} jobs. Their progress: {_command('status', config)}")


def check_idle(config: Config) -> None:
    """Refuses a run folder whose jobs, of any launcher, are still in the queue.

    Raises:
        ValueError: there are such jobs, or squeue does not respond.
    """
    if alive := queue.alive(Path(config.run_dir)):
        raise ValueError(
            f"An earlier launch of {config.run_dir} is still active (jobs {', '.join(alive)}): "
            f"wait for it to end, or end it with `{_command('status', config)} --cancel`."
        )


def _check_cluster(config: Config) -> None:
    """Refuses a configuration that no cluster can run."""
    cluster, launcher = config.cluster, config.launcher
    if cluster.gpus_per_node < 1:
        raise ValueError(
            f"launcher={launcher.kind} needs a cluster: add cluster=b200_8, or your own: "
            "`nemo-rod init FOLDER` writes FOLDER/cluster/ours.yaml."
        )
    for key in ("account", "partition", "image"):
        if str(getattr(cluster, key)).startswith("YOUR_") or getattr(cluster, key) == "":
            raise ValueError(
                f"cluster.{key} is still '{getattr(cluster, key)}': set it to your own, or to null "
                "if your cluster has none."
            )
    run_dir, letters = Path(config.run_dir).absolute(), "%\\\n,:" if cluster.image else "%\\\n"
    if special := sorted({*letters} & {*str(run_dir)}):
        raise ValueError(
            f"run_dir={run_dir} has a {special[0]!r}, which Slurm or the container would not "
            "take literally: choose another run_dir."
        )
    if cluster.image and {*",:\n"} & {*str(Path.cwd())}:
        raise ValueError(
            f"The working folder, {Path.cwd()}, has a ',', a ':' or a line break, which the "
            "container would not take literally: submit from another folder."
        )
    if lists := [mount for mount in cluster.mounts if "," in mount or mount[:1] in ("", "~", "$")]:
        raise ValueError(
            f"cluster.mounts has {lists[0]!r}: make it one entry for each mount, with whole paths, "
            "such as /data:/data."
        )
    for key, value in cluster.env.items():
        if re.search(r"^~|\$[A-Za-z_{]", value) and not REFERENCE.fullmatch(value):
            raise ValueError(
                f"cluster.env.{key}={value} has a part that no shell replaces: write a whole path, "
                "or ${oc.env:NAME} for a variable, or export it in a line of cluster.setup."
            )
    for key in ("time", "sbatch.time-min", "cpu_sbatch.time", "cpu_sbatch.time-min"):
        section, _, name = key.rpartition(".")
        time = str((getattr(cluster, section) if section else vars(cluster)).get(name))
        if not re.fullmatch(r"(\d+-)?\d+(:\d+)*", time):  # not given, or unlimited
            continue
        days, dash, clock = time.rpartition("-")
        units = (3600, 60, 1) if dash or clock.count(":") == 2 else (60, 1)  # as sbatch reads it
        limit = int(days or 0) * 86400 + sum(map(mul, map(int, clock.split(":")), units))
        if 0 < limit <= launcher.grace_seconds:
            raise ValueError(
                f"cluster.{key}={time} is no longer than launcher.grace_seconds="
                f"{launcher.grace_seconds}, so its jobs would be stopped at their start: raise the "
                "former, or lower the latter."
            )
    _check_options(config)
    if (image := cluster.image) is not None:
        file, in_apptainer = Path(image), cluster.container == "apptainer"
        # otherwise it is a registry's address
        is_file = in_apptainer or file.suffix == ".sqsh" or file.is_absolute()
        if is_file and not file.is_absolute():
            raise ValueError(
                f"cluster.image={image} is not an absolute path: with cluster.container=apptainer, "
                "expected that of a .sif file, made by `apptainer build`, or of an unpacked image."
                if in_apptainer
                else f"cluster.image={image} is relative, and pyxis takes that for the address of "
                f"a registry: expected the whole path, such as {file.absolute()}."
            )
        is_there = file.exists() if in_apptainer else file.is_file()
        if is_file and not is_there and not config.dry_run:
            program = "apptainer build" if in_apptainer else "enroot import"
            also = "" if in_apptainer else ", or an address of a registry"
            raise ValueError(
                f"cluster.image={image} is not there: expected a file that `{program}` made, on a "
                f"file system that all nodes share{also}."
            )
    check_nodes(config.parallel, cluster.gpus_per_node)
    launcher_of(config).check_cluster(config)


def _check_options(config: Config) -> None:
    """Refuses options of sbatch that are set twice, or that a chain of jobs cannot have."""
    cluster = config.cluster
    for key in ("sbatch", "cpu_sbatch"):
        if len(given := [name for name in _MEMORY if name in getattr(cluster, key)]) > 1:
            raise ValueError(
                f"cluster.{key} has {' and '.join(given)}, of which sbatch takes one: leave one."
            )
        for name, value in getattr(cluster, key).items():
            known = {*_OWN_OPTIONS, *_OF_GPUS, *_OF_CLUSTER, *_MEMORY, "cpus-per-task", "job-name"}
            if len(name) == 1 or (name not in known and any(o.startswith(name) for o in known)):
                raise ValueError(f"cluster.{key}.{name} is a short option: write its long name.")
            if key == "sbatch" and name in _OF_CLUSTER:
                raise ValueError(
                    f"cluster.sbatch.{name} is set, beside cluster.{name}: remove it, and set the "
                    "latter; cluster.cpu_sbatch is for the stages without GPUs."
                )
            if name in _OWN_OPTIONS:
                raise ValueError(f"cluster.{key}.{name} is set, but {_OWN_OPTIONS[name]}.")
            if isinstance(value, bool | dict | list):
                raise ValueError(
                    f"cluster.{key}.{name}={value} is not valid: expected a text, a number, or "
                    "null for an option without a value."
                )
            if key == "sbatch" and name in _OF_GPUS:
                _check_gpus(config, name, str(value))


def _check_gpus(config: Config, option: str, value: str) -> None:
    """Refuses an option of sbatch that asks for other GPUs than the cluster's own keys."""
    cluster, counts = config.cluster, []
    for item in value.lower().replace(" ", "").split(","):
        words = re.split("[:=/]", item.removeprefix("gres:").removeprefix("gres/").split("(")[0])
        if option == "gpus-per-node" or words[0] in ("gpu", "mps", "shard"):
            counts.append(int(words[-1]) if words[-1].isdigit() else 1)
    asked = {cluster.gpus_per_node, min(config.parallel.world_size, cluster.gpus_per_node)}
    if counts and (option != cluster.gpu_option or sum(counts) not in asked):
        raise ValueError(
            f"cluster.sbatch.{option}={value} asks for {sum(counts)} GPUs a node, beside "
            f"cluster.gpus_per_node={cluster.gpus_per_node}, which cluster.gpu_option="
            f"{cluster.gpu_option} asks for: remove it, or correct these two."
        )


def _command(name: str, config: Config) -> str:
    return shlex.join(["nemo-rod", name, config.run_dir])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
