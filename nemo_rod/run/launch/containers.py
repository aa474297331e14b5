"""The container in which the nodes of a job run their command.

pyxis adds options to srun. Apptainer is a separate command: srun starts `container.sh` on every
node, and that starts Apptainer.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from nemo_rod.config import Config

APPTAINER = Path(__file__).parent / "apptainer.sh"
WAIT = APPTAINER.with_name("wait.sh")
_HEAD = """\
#!/bin/bash
# What every node of a stage starts: Apptainer, and in it the rest of the command line.
"""


def in_apptainer(config: Config) -> bool:
    """Returns whether jobs run in a container of Apptainer."""
    return config.cluster.image is not None and config.cluster.container == "apptainer"


def mounts(config: Config) -> list[str]:
    """Returns the container's mounts: the run's folder, the working folder, and the cluster's."""
    own = dict.fromkeys([str(Path(config.run_dir).absolute()), str(Path.cwd())])
    return [*(f"{folder}:{folder}" for folder in own), *config.cluster.mounts]


def pyxis_options(config: Config) -> dict[str, str | None]:
    """Returns srun's options for a container of pyxis, by long name; none without one."""
    if config.cluster.image is None or in_apptainer(config):
        return {}
    return {
        "container-image": config.cluster.image,
        "container-mounts": ",".join(mounts(config)),
        "container-workdir": str(Path.cwd()),
        "no-container-mount-home": None,
    }


def render_apptainer(config: Config) -> str:
    """Returns `container.sh`, which runs its arguments in Apptainer.

    The image stays unchanged; a job writes to a layer in memory. /tmp and the home
    folder are empty folders of this job on the node's own disk. The private PID namespace ends
    every process with the command, Ray's daemons included.
    """
    options = ["--pid", "--writable-tmpfs", "--no-mount", "tmp"]
    options += ["--nv"] if config.cluster.gpu is not None else []
    options += ["--pwd", str(Path.cwd())]
    for mount in mounts(config):
        options += ["--bind", mount]
    image = shlex.quote(config.cluster.image or "")
    lines = [f"image={image}", f"options=({shlex.join(options)})"]
    return "\n".join([_HEAD[:-1], *lines, "", WAIT.read_text(), APPTAINER.read_text()])


def node_caches(config: Config) -> dict[str, str]:
    """Returns the caches that a container of Apptainer keeps on the node's own disk.

    A shared file system is slow for them, and their locks may fail on it. pyxis unpacks its image
    there anyway.
    """
    if not in_apptainer(config):
        return {}
    return {
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        "CUDA_CACHE_PATH": "/tmp/cuda",
        "HF_DATASETS_CACHE": "/tmp/datasets",
    }
