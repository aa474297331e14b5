"""`launcher=ray`: stages that NeMo-RL runs, each on a Ray cluster of its own.

Rendered under `<run_dir>/launch/ray/`: for each stage of NeMo-RL a `<stage>.sh`, which sets the
variables of NeMo-RL's ray.sub and submits `ray.sbatch`. That runs ray.sub with ports of this job
alone and requeues the job near its time limit. With Apptainer, which ray.sub does not support,
these stages are jobs as in `launcher=slurm`, and `ray_node.py` starts Ray. All other stages are
jobs as in `launcher=slurm`, too.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.hosts.nemo_rl import ray_node
from nemo_rod.hosts.nemo_rl.launcher import NemoRL
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import containers, slurm
from nemo_rod.run.launch.render import launch_folder, python_of, stage_command

RAY = Path(__file__).parent / "ray.sh"
_COMMANDS = ("train", "reference")  # stages of NeMo-RL; the others need no Ray
_ON_NEMO_RL = "launcher.kind=nemo_rl"  # its workers, on a cluster that is there, run the stage
_SUBMIT_ONE = f"""\
if [[ -e $folder/$name.sh ]]; then
    bash "$folder/$name.sh" ${{after:+"--dependency=afterok$after"}}
  else
    {slurm.SBATCH}
  fi"""


_RAY_SBATCH = """\
#!/bin/bash
# NeMo-RL's ray.sub, with ports that no other job's Ray uses, and a key without which nobody can use
# this one's. Variables that are set, by cluster.env say, are left as they are. Its argument is the
# record of the stage.
set -euo pipefail
"""


class RayOnSlurm(NemoRL):
    """Submits every stage as a job; those of NeMo-RL start a Ray cluster."""

    submits = True

    def exports(self, arm: str) -> bool:
        """Returns whether steps of an arm can be exported; Megatron-Bridge trains the base."""
        return arm == "base"

    def check_cluster(self, config: Config) -> None:
        """Refuses a cluster without a container that holds NeMo-RL."""
        if config.cluster.image is None:
            raise ValueError("launcher=ray needs a container with NeMo-RL: set cluster.image.")
        if config.launcher.nemo_rl is None and config.cluster.container == "pyxis":
            raise ValueError(
                "launcher=ray submits ray.sub of NeMo-RL's checkout: set launcher.nemo_rl, or "
                "cluster.container=apptainer, which does without."
            )

    def render(self, config: Config, stages: list[Stage]) -> dict[str, str]:
        """Returns the files of the launch, by name."""
        files = slurm.Slurm().render(config, stages)
        if containers.in_apptainer(config):
            start = shlex.join([python_of(config), "-P", "-m", "nemo_rod.hosts.nemo_rl.ray_node"])
            for stage in filter(_on_nemo_rl, stages):
                command = f"{start} {stage_command(config, stage)} {_ON_NEMO_RL}"
                files[f"{stage.name}.sbatch"] = slurm.render_job(config, stage, command)
            return files
        files["ray.sbatch"] = _render_ray_sbatch(config)
        for stage in filter(_on_nemo_rl, stages):
            del files[f"{stage.name}.sbatch"]
            files[f"{stage.name}.sh"] = _render_ray(config, stage)
        files["submit.sh"] = slurm.render_submit(config, stages, _SUBMIT_ONE)
        return files


def _on_nemo_rl(stage: Stage) -> bool:
    return stage.command.split()[0] in _COMMANDS


def _render_ray_sbatch(config: Config) -> str:
    """Returns the job script of all stages of NeMo-RL."""
    offsets = {**ray_node.HEAD_PORTS, **ray_node.METRIC_PORTS, **ray_node.NODE_PORTS}
    low, high = ray_node.WORKER_PORTS
    offsets |= {"MIN_WORKER_PORT": low, "MAX_WORKER_PORT": high}
    slot = f"SLURM_JOB_ID % {ray_node.JOBS} * {ray_node.PORTS_PER_JOB}"
    store = ray_node.OBJECT_STORE
    lines = [
        f"base=$(({ray_node.FIRST_PORT} + {slot}))",
        *(f"export {name}=${{{name}:-$((base + {offset}))}}" for name, offset in offsets.items()),
        f"export {store}=${{{store}:-{ray_node.OBJECT_STORE_BYTES}}}",
        "export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}",
        "RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}",
        "export RAY_AUTH_TOKEN",
        "record=$1",
        f"max_requeues={config.launcher.requeues}",
        f"ray_sub={shlex.quote(str(Path(config.launcher.nemo_rl or '') / 'ray.sub'))}",
    ]
    parts = ["\n".join(lines) + "\n", *(file.read_text() for file in (*slurm.REQUEUE, RAY))]
    return _RAY_SBATCH + "\n".join(parts)


def _render_ray(config: Config, stage: Stage) -> str:
    """Returns the script that submits one stage, on whole nodes, to NeMo-RL's ray.sub."""
    cluster, folder = config.cluster, launch_folder(config)
    logs = Path(config.run_dir).absolute() / "logs" / "ray"
    command = f"bash {shlex.quote(str(folder / 'node.sh'))} {stage_command(config, stage)}"
    environment = {
        "CONTAINER": cluster.image or "",
        "MOUNTS": ",".join(containers.mounts(config)),
        "GPUS_PER_NODE": str(cluster.gpus_per_node),
        "BASE_LOG_DIR": str(logs),
        "COMMAND": f"{command} {_ON_NEMO_RL}",
    }
    # ray.sub requests 16 cores per GPU by default; cpu_cores=1 means that their number is unknown
    cores = {} if cluster.cpu_cores == 1 else {"CPUS_PER_WORKER": str(cluster.cpu_cores)}
    gpus = slurm.gpu_request(cluster, cluster.gpus_per_node)
    whole = {"mem": "0", "nodes": str(slurm.num_nodes(config)), "exclusive": None}
    options = slurm.job_options(config, stage, {**whole, cluster.gpu_option: gpus})
    title = f"{stage.title}, by NeMo-RL on a Ray cluster. More options of sbatch may follow."
    lines = [
        "#!/bin/bash",
        slurm.comment(title),
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))} # the container's working folder",
        f"mkdir -p {shlex.quote(str(logs))}",
        *slurm.exports({**cores, **cluster.env, **environment}),
        "exec sbatch --parsable \\",
        *(f"  {option} \\" for option in slurm.shell_options(options)),
        f'  "$@" {shlex.join([str(folder / "ray.sbatch"), slurm.log_path(config, stage)])}',
    ]
    return "\n".join(lines) + "\n"
