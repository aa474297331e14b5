"""The files that a launcher writes before anything starts, in plain text to read, keep and edit.

<run_dir>/launch/<launcher>/
config.yaml   the whole configuration, so that later edits of the recipe have no effect
...           scripts that the launcher starts
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from nemo_rod.config import Config
from nemo_rod.files import by_launch, launch_number, read_bytes, remove, replacing
from nemo_rod.run.handover import Stage
from nemo_rod.trust import REFERENCE

CONFIG_HEAD = """\
# Everything this run was launched with; what each key means is in nemo_rod/config.py.
defaults:
  - schema
  - override hydra/job_logging: none
  - _self_
hydra:
  output_subdir: null
  run: {dir: .}
"""


def launch_folder(config: Config) -> Path:
    """Returns the folder of a launch's files."""
    return Path(config.run_dir).absolute() / "launch" / config.launcher.kind


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Replaces the files of an earlier launch; only their owner reads them: they may hold keys."""
    run_dir, earlier = folder.parent.parent, map(launch_number, folder.parent.glob("*/number"))
    number = f"{max(earlier, default=0) + 1}"
    files = {**files, "command": typed_command(folder), "number": number}
    remove(folder, below=run_dir)
    for name, text in files.items():
        with replacing(folder / name, below=run_dir, mode=0o600) as file:
            file.write(text.encode())


def typed_command(folder: Path) -> str:
    """Returns the command that composed this, or its latest launch; "" of one from elsewhere."""
    if not HydraConfig.initialized():
        return ""
    job = HydraConfig.get()
    if "recipe" not in job.runtime.choices:
        run_dir = folder.parents[1]
        earlier = [read_bytes(f, below=run_dir) for f in by_launch(run_dir, "command")[-1:]]
        return b"".join(earlier).decode(errors="replace")
    once = ("rebuild=", "dry_run=")
    # not resolved: ${oc.env:NAME} may be a secret
    typed: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
    words = [word for word in map(str, typed) if not word.startswith(once)]
    program = sys.argv[0].split() if sys.argv[0].startswith("nemo-rod ") else ["nemo-rod", "run"]
    return shlex.join([*program, *config_dir(), *words])


def config_dir() -> list[str]:
    """Returns the option of this command that names a folder of configurations, if it has one."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else ()
    return [f"--config-dir={each.path}" for each in sources if each.provider == "command-line"]


def frozen_config(config: Config) -> str:
    """Returns `config.yaml`, the configuration of every stage's command, on any machine."""
    frozen = dataclasses.replace(
        config,
        run_dir=str(Path(config.run_dir).absolute()),
        launcher=dataclasses.replace(config.launcher, kind="local"),
        dry_run=False,
        rebuild=[],  # done at launch: a requeued stage must resume
    )
    values = escape_interpolations(dataclasses.asdict(frozen))
    secrets = {key: text for key, text in config.cluster.env.items() if REFERENCE.fullmatch(text)}
    values["cluster"]["env"] |= secrets  # never resolved here
    return CONFIG_HEAD + OmegaConf.to_yaml(OmegaConf.create(values))


def escape_interpolations(value: Any) -> Any:
    """Escapes every `${` in values, which are resolved when OmegaConf reads them."""
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def python_of(config: Config) -> str:
    """Returns the Python that runs the stages."""
    return config.cluster.python or ("python3" if config.cluster.image else sys.executable)


def stage_command(config: Config, stage: Stage) -> str:
    """Returns the shell command of a stage, with the frozen configuration."""
    command, *overrides = stage.command.split()
    config_path = ["--config-path", str(launch_folder(config)), "--config-name", "config"]
    words = [python_of(config), "-P", "-m", "nemo_rod.cli", command, *config_path, *overrides]
    return shlex.join(words)
