"""Launchers that render their stages as Slurm jobs and submit them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.run.handover import Stage
from nemo_rod.run.launch import launcher_of, queue
from nemo_rod.run.launch.render import launch_folder, write_files
from nemo_rod.run.stages import Stages


def submit(stages: Stages, chosen: list[Stage]) -> None:
    """Renders the unfinished ones of some stages and, without `dry_run`, submits them.

    Raises:
        ValueError: if the cluster's configuration is invalid, Slurm is missing, or an earlier
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
    left = _not_done(stages, chosen)
    write_files(folder, stages.launcher.render(config, left))
    if config.dry_run:
        _say(f"{len(left)} jobs rendered, none submitted: bash {folder / 'submit.sh'}")
        return
    done = subprocess.run(["bash", str(folder / "submit.sh")], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"Slurm refused the chain: {done.stderr.strip()}")
    everything = queue.read_jobs(Path(config.run_dir))
    jobs = {n: job for n, job in everything.items() if job.launcher == config.launcher.kind}
    titles = {stage.name: stage.title for stage in left}
    for number, job in jobs.items():
        _say(f"{number:>10}  {titles[job.stage]}")
    _say(f"Submitted {len(jobs)} jobs. How they fare: nemo-rod status {config.run_dir}")


def _not_done(stages: Stages, chosen: list[Stage]) -> list[Stage]:
    """Returns the stages to submit."""
    config, known = stages.config, {stage.name: stage for stage in stages.all()}
    left: dict[str, Stage] = {}
    for stage in chosen:
        again = stage.name in config.rebuild
        for need in stage.needs:
            if need not in left and need in known and not known[need].is_there():
                raise ValueError(
                    f"{stage.name} needs {need}, which is not there yet: run `nemo-rod "
                    f"{known[need].command} recipe={config.recipe}` first."
                )
        if again or any(need in left for need in stage.needs) or not stage.is_done():
            left[stage.name] = stage
        if again and not config.dry_run:
            stage.move_aside()
    return list(left.values())


def check_idle(config: Config) -> None:
    """Refuses a run folder with a chain in the queue, whatever launcher submitted it.

    Raises:
        ValueError: naming the chain's jobs; or if Slurm does not say whether there are any.
    """
    if alive := queue.alive(Path(config.run_dir)):
        raise ValueError(
            f"An earlier launch of {config.run_dir} is at work (jobs {', '.join(alive)}): "
            f"wait for it to end, or end it with `nemo-rod cancel {config.run_dir}`."
        )


def _check_cluster(config: Config) -> None:
    """Refuses a configuration that no cluster can run."""
    cluster, launcher = config.cluster, config.launcher
    if cluster.gpus_per_node < 1:
        raise ValueError(
            f"launcher={launcher.kind} needs a cluster: add cluster=b200_8, or your own, made from "
            "hydra_configs/cluster/template.yaml."
        )
    for key in ("account", "partition", "image"):
        if str(getattr(cluster, key)).startswith("YOUR_"):
            raise ValueError(
                f"cluster.{key} is still '{getattr(cluster, key)}': set it to your own, or to null "
                "if your cluster has none."
            )
    run_dir, letters = Path(config.run_dir).absolute(), "%,:" if cluster.image else "%"
    if found := sorted({*letters} & {*str(run_dir)}):
        raise ValueError(
            f"run_dir={run_dir} has a '{found[0]}', which Slurm or the container would take for "
            "something else than a part of a path: choose another run_dir."
        )
    if found := [mount for mount in cluster.mounts if "," in mount]:
        raise ValueError(f"cluster.mounts has {found[0]!r}: make it one entry for each mount.")
    for key in ("sbatch", "cpu_sbatch"):
        if "output" in getattr(cluster, key):
            raise ValueError(
                f"cluster.{key}.output is set, but nemo-rod recognises its jobs by their log: "
                "remove it, and read run_dir/logs/slurm."
            )
    if cluster.image is not None:
        check = _check_sif if cluster.container == "apptainer" else _check_image
        check(cluster.image, must_exist=not config.dry_run)
    world_size = config.parallel.world_size
    if world_size > cluster.gpus_per_node and world_size % cluster.gpus_per_node:
        raise ValueError(
            f"The layout's {world_size} processes do not fill nodes of "
            f"cluster.gpus_per_node={cluster.gpus_per_node}: change parallel.data, or the cluster."
        )
    launcher_of(config).check_cluster(config)


def _check_image(image: str, *, must_exist: bool) -> None:
    """Refuses a relative path, for which pyxis would query a registry, and a missing file."""
    file = Path(image)
    if file.suffix != ".sqsh" and not file.is_absolute():
        return
    if not file.is_absolute():
        raise ValueError(
            f"cluster.image={image} is relative, and pyxis takes that for the address of a "
            f"registry: expected the whole path, such as {file.absolute()}."
        )
    if must_exist and not file.is_file():
        raise ValueError(
            f"cluster.image={image} is not there: expected a file that `enroot import` made, on a "
            "file system that all nodes share, or a registry's address."
        )


def _check_sif(image: str, *, must_exist: bool) -> None:
    """Refuses an address, which Apptainer would fetch once per node, and a missing file."""
    file = Path(image)
    if not file.is_absolute():
        raise ValueError(
            f"cluster.image={image} is no whole path: with cluster.container=apptainer, expected "
            "that of a .sif file, which `apptainer build` makes, or of an unpacked image."
        )
    if must_exist and not file.exists():
        raise ValueError(
            f"cluster.image={image} is not there: expected a file that `apptainer build` made, on "
            "a file system that all nodes share."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
