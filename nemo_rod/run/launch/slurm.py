"""`launcher=slurm`: one sbatch job per stage, each after the jobs that it needs.

Rendered under `<run_dir>/launch/slurm/`:

    config.yaml      the whole configuration
    <stage>.sbatch   resources and command of a job
    stage.sh         common part of all jobs: run the command on all nodes, requeue when stopped
    container.sh     with Apptainer, its start on every node
    node.sh          script of every node, inside the container if there is one
    submit.sh        submits all jobs and writes jobs.tsv with the number of each
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nemo_rod.config import Cluster, Config
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import containers
from nemo_rod.run.launch.local import Local
from nemo_rod.run.launch.queue import slurm_logs
from nemo_rod.run.launch.render import frozen_config, launch_folder, stage_command
from nemo_rod.run.stage_log import StageLog
from nemo_rod.trust import REFERENCE

STAGE = Path(__file__).parent / "stage.sh"
# how a job waits for what it started, and goes back into the queue
REQUEUE = (containers.WAIT, STAGE.with_name("requeue.sh"))
SBATCH = 'sbatch --parsable ${after:+"--dependency=afterok$after"} "$folder/$name.sbatch"'
_NODE = """\
#!/bin/bash
# What every node of a stage runs, inside the container where there is one.
set -eo pipefail
"""

_EXPORT_REFERENCE = """\
if [[ -n ${{{name}:-}} ]]; then
  export {key}="${name}"
  echo "cluster.env.{key} is set" >&2
else
  echo "cluster.env.{key} is not set: {name} is not in the environment of this job" >&2
fi"""


class Slurm(Local):
    """Submits every stage as a separate job."""

    submits = True
    environment = False

    def render(self, config: Config, stages: list[Stage]) -> dict[str, str]:
        """Returns the files of the launch, by name; all other stages are done."""
        inside = containers.in_apptainer(config)
        return {
            "config.yaml": frozen_config(config),
            **{f"{stage.name}.sbatch": render_job(config, stage) for stage in stages},
            "stage.sh": render_stage(config),
            **({"container.sh": containers.render_apptainer(config)} if inside else {}),
            "node.sh": render_node(config),
            "submit.sh": render_submit(config, stages, SBATCH),
        }


def num_nodes(config: Config) -> int:
    """Returns the number of nodes of a stage that runs a model."""
    return -(-config.parallel.world_size // config.cluster.gpus_per_node)


def render_job(config: Config, stage: Stage, command: str | None = None) -> str:
    """Returns the job script of a stage.

    Args:
        config: configuration of the run.
        stage: the stage.
        command: shell command to run instead of the stage's own.
    """
    folder, cluster = launch_folder(config), config.cluster
    options: dict[str, str | None] = {"nodes": "1", "ntasks-per-node": "1"}
    if stage.runs_model:
        processes = min(config.parallel.world_size, cluster.gpus_per_node)
        options["nodes"] = str(num_nodes(config))
        if cluster.gpu is not None:
            options[cluster.gpu_option] = gpu_request(cluster, processes)
        cores = cluster.cpu_cores * processes // cluster.gpus_per_node
        options["cpus-per-task"] = str(max(1, cores))
        if processes == cluster.gpus_per_node and cluster.exclusive:
            options |= {"exclusive": None, "mem": "0"}
        elif cluster.node_memory_gib:
            memory = cluster.node_memory_gib * processes / cluster.gpus_per_node
            options["mem"] = f"{int(memory)}G"
    else:
        workers = config.domain.workers if "prepare" in (stage.name, stage.feeds) else 1
        options["cpus-per-task"] = str(max(cluster.cpu_stage_cores, workers))
        options["mem"] = f"{cluster.cpu_stage_memory_gib}G"
    options = job_options(config, stage, options)
    scripts = ("container.sh", "node.sh") if containers.in_apptainer(config) else ("node.sh",)
    words = [word for name in scripts for word in ("bash", str(folder / name))]
    lines = [
        "#!/bin/bash",
        # sbatch takes a backslash for an escape even in single quotes
        *(f"#SBATCH {option}".replace("\\", r"\\") for option in shell_options(options)),
        comment(stage.title),
        "",
        f"command=({shlex.join(words)} {command or stage_command(config, stage)})",
        f"record={shlex.quote(log_path(config, stage))}",
        f"source {shlex.quote(str(folder / 'stage.sh'))}",
    ]
    return "\n".join(lines) + "\n"


def gpu_request(cluster: Cluster, count: int) -> str:
    """Returns the value of `cluster.gpu_option` for a number of GPUs per node."""
    return str(count) if cluster.gpu_option == "gpus-per-node" else f"gpu:{count}"


def log_path(config: Config, stage: Stage) -> str:
    """Returns the path of the stage's log."""
    return str(StageLog(Path(config.run_dir).absolute(), stage.name).path)


def render_stage(config: Config) -> str:
    """Returns the script that every job sources: its variables, then its commands."""
    options = {
        "nodes": '"$SLURM_JOB_NUM_NODES"',
        "ntasks-per-node": "1",
        "cpus-per-task": '"$SLURM_CPUS_PER_TASK"',  # srun no longer inherits it from sbatch
        "cpu-bind": "none",
        "kill-on-bad-exit": "1",
        "export": "ALL",  # srun would inherit --export=NONE from the submission
    }
    lines = [
        "# shellcheck shell=bash disable=SC2154",
        "srun_options=(",
        *(f"  --{name}={value}" for name, value in options.items()),
        *(f"  {option}" for option in shell_options(containers.pyxis_options(config))),
        ")",
        f"max_requeues={config.launcher.requeues}",
    ]
    parts = [file.read_text() for file in (*REQUEUE, STAGE)]
    return "\n".join(["\n".join(lines) + "\n", *parts])


def render_node(config: Config) -> str:
    """Returns the script of every node."""
    environment = containers.node_caches(config) | config.cluster.env
    lines = [*exports(environment), *config.cluster.setup, 'exec "$@"']
    return _NODE + "\n".join(lines) + "\n"


def exports(environment: dict[str, str]) -> list[str]:
    """Returns shell lines that export variables.

    A reference `${oc.env:NAME}` is resolved in the job, whose environment is that of the submitting
    shell. The job's log shows whether the variable is set, not its value.

    Raises:
        ValueError: a name is not a variable's.
    """
    lines = []
    for key, value in environment.items():
        _expect_word(r"[A-Za-z_][A-Za-z0-9_]*", key, "cluster.env", "names of variables")
        if match := REFERENCE.fullmatch(value):
            lines.append(_EXPORT_REFERENCE.format(key=key, name=match[1]))
        else:
            lines.append(f"export {key}={shlex.quote(value)}")
    return lines


def comment(text: str) -> str:
    """Returns a comment of a shell script; a line break would end it."""
    return f"# {' '.join(text.split())}"


def render_submit(config: Config, stages: list[Stage], submit_one: str) -> str:
    """Returns the script that submits all jobs.

    `submit_one` is the shell command that submits `$name` after `$after` and prints its job number.
    """
    names = {stage.name for stage in stages}
    head, cluster = STAGE.with_name("submit.sh").read_text(), config.cluster
    # of the environment, where the cluster's file leaves them open
    given = {*cluster.cpu_sbatch} | {key for key, v in vars(cluster).items() if v is not None}
    open_keys = [key for key in ("account", "partition", "qos") if not {key, f"cpu_{key}"} & given]
    for name, text in (
        ("kept", "".join(f"|SBATCH_{key.upper()}" for key in open_keys)),
        ("folder", shlex.quote(str(launch_folder(config)))),
        ("cwd", shlex.quote(str(Path.cwd()))),
        ("logs", shlex.quote(str(slurm_logs(Path(config.run_dir))))),
        ("submit_one", submit_one),
    ):
        head = head.replace(f"{{{name}}}", text)
    lines = [
        shlex.join(["submit", stage.name, *(need for need in stage.needs if need in names)])
        for stage in stages
    ]
    return head + "\n".join(lines) + "\n"


def job_options(
    config: Config, stage: Stage, resources: dict[str, str | None]
) -> dict[str, str | None]:
    """Returns the sbatch options of a stage, by long name; None for options without a value.

    Those of the cluster file override the `resources` that its job needs.
    """
    cluster = config.cluster
    log = slurm_logs(Path(config.run_dir)) / f"{stage.name}.out"
    options: dict[str, str | None] = {"job-name": f"{config.recipe}.{stage.name}"}
    for key in ("account", "partition", "qos"):
        if (value := getattr(cluster, key)) is not None:
            options[key] = value
    if not stage.runs_model and cluster.cpu_partition is not None:
        options["partition"] = cluster.cpu_partition
    options |= {
        "time": cluster.time,
        "output": str(log),
        "open-mode": "append",
        "requeue": None,
        "kill-on-invalid-dep": "yes",
    }
    # B: warns the job script alone of the time limit
    resources = resources | {"signal": f"B:USR1@{config.launcher.grace_seconds}"}
    given = cluster.sbatch if stage.runs_model else cluster.cpu_sbatch
    more = {key: None if v is None else str(v) for key, v in given.items()}
    if {"mem-per-cpu", "mem-per-gpu"} & more.keys():  # sbatch takes one of them
        resources.pop("mem", None)
    if "gres" in resources and not re.search(r"(?i)(^|,)\s*gpu(?!\w)", more.get("gres") or "gpu"):
        more["gres"] = f"{resources['gres']},{more['gres']}"
    every = options | more | resources | more  # the cluster file's stand before the resources
    return {name: value for name, value in every.items() if f"no-{name}" not in more}


def shell_options(options: dict[str, str | None]) -> list[str]:
    """Returns options as words of a shell command, or of a directive, which is one line.

    Raises:
        ValueError: a name is not an option's, or a value has a line break.
    """
    words = []
    for key, value in options.items():
        _expect_word(r"[A-Za-z][A-Za-z0-9-]*", key, "cluster.sbatch", "names of sbatch's options")
        _expect_word(r".*", value or "", f"cluster.{key}", "a value in one line")
        if value is None:
            words.append(f"--{key}")
            continue
        quoted = shlex.quote(value)
        if quoted == value and "," in value:  # shellcheck would warn of the comma
            quoted = f"'{value}'"
        words.append(f"--{key}={quoted}")
    return words


def _expect_word(pattern: str, word: str, where: str, expected: str) -> None:
    if not re.fullmatch(pattern, word):
        raise ValueError(f"{where} has {word!r}, expected {expected}: correct the cluster file.")
