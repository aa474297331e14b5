"""`launcher=ray`: stages that NeMo-RL runs, each on a Ray cluster started by its ray.sub.

Rendered under `<run_dir>/launch/ray/`: for each stage of NeMo-RL a `<stage>.sh`, which sets the
variables of ray.sub and submits it. Other stages are ordinary Slurm jobs, as in `launcher=slurm`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.launch import slurm
from nemo_rod.launch.render import launch_folder, stage_command
from nemo_rod.recipe.handover import Stage

_COMMANDS = ("train", "reference")  # stages of NeMo-RL; the others need no Ray
_SUBMIT_ONE = f"""\
if [[ -e $folder/$name.sh ]]; then
    bash "$folder/$name.sh" ${{after:+"--dependency=afterok$after"}}
  else
    {slurm.SBATCH}
  fi"""


def render(config: Config, stages: list[Stage]) -> dict[str, str]:
    """Returns the files of `launcher=ray`, by name."""
    files = slurm.render(config, stages)
    for stage in stages:
        if stage.command.split()[0] in _COMMANDS:
            del files[f"{stage.name}.sbatch"]
            files[f"{stage.name}.sh"] = _render_ray(config, stage)
    files["submit.sh"] = slurm.render_submit(config, stages, _SUBMIT_ONE)
    return files


def _render_ray(config: Config, stage: Stage) -> str:
    """Returns the script that submits one stage to NeMo-RL's ray.sub."""
    cluster = config.cluster
    node = launch_folder(config) / "node.sh"
    logs = Path(config.run_dir).absolute() / "logs" / "ray"
    environment = {
        "CONTAINER": cluster.image or "",
        "MOUNTS": ",".join(slurm.container_mounts(config)),
        "GPUS_PER_NODE": str(cluster.gpus_per_node),
        "BASE_LOG_DIR": str(logs),
        # NeMo-RL's workers, on the cluster started by ray.sub, run the stage
        "COMMAND": f"bash {shlex.quote(str(node))} {stage_command(config, stage)} "
        "launcher.kind=nemo_rl",
    }
    options = slurm.job_options(config, stage)
    options |= {"nodes": str(slurm.num_nodes(config)), "exclusive": None}
    count = cluster.gpus_per_node
    options[cluster.gpu_option] = str(count) if cluster.gpu_option != "gres" else f"gpu:{count}"
    assert config.launcher.nemo_rl is not None
    lines = [
        "#!/bin/bash",
        slurm.comment(
            f"{stage.title}, by NeMo-RL on a Ray cluster. More options of sbatch may follow."
        ),
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))} # the container's working folder",
        f"mkdir -p {shlex.quote(str(logs))}",
        *slurm.exports({**cluster.env, **environment}),
        "exec sbatch --parsable \\",
        *(f"  {option} \\" for option in slurm.shell_options(options)),
        f'  "$@" {shlex.quote(str(Path(config.launcher.nemo_rl) / "ray.sub"))}',
    ]
    return "\n".join(lines) + "\n"
