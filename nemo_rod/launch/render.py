"""The files that a launcher writes before anything starts: plain ones, to read, keep and edit.

<run_dir>/launch/<launcher>/
config.yaml   the whole configuration, so that a recipe edited later changes nothing
...           what the launcher starts
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nemo_rod.config import Config
from nemo_rod.recipe.checks import to_config
from nemo_rod.recipe.handover import Stage

_CONFIG_HEAD = """\
# Everything this run was launched with; what each key means is in nemo_rod/config.py.
defaults:
  - schema
  - override hydra/job_logging: none
  - _self_
hydra:
  output_subdir: null
  run: {dir: .}
"""
_LOCAL = """\
#!/bin/bash
# The whole run on this machine, one command after the other; each skips what is done.
set -euo pipefail
cd {cwd}
"""


def launch_folder(config: Config) -> Path:
    """Where the files of a launch go."""
    return Path(config.run_dir).absolute() / "launch" / config.launcher.kind


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Puts the files of a launch in place of those of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def frozen_config(config: Config) -> str:
    """`config.yaml`: what a stage's command is started with, wherever it runs."""
    frozen = dataclasses.replace(
        config,
        run_dir=str(Path(config.run_dir).absolute()),
        launcher=dataclasses.replace(config.launcher, kind="local"),
        dry_run=False,
        rebuild=[],  # done at launch: a stage that is taken up again must not start anew
    )
    return _CONFIG_HEAD + OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(frozen)))


def stage_command(config: Config, stage: Stage) -> str:
    """The shell command of a stage, with the frozen configuration."""
    command, *overrides = stage.command.split()
    python = config.cluster.python or ("python3" if config.cluster.image else sys.executable)
    config_path = ["--config-path", str(launch_folder(config)), "--config-name", "config"]
    return shlex.join([python, "-m", "nemo_rod.cli", command, *config_path, *overrides])


def render_local(config: Config, stages: list[Stage]) -> dict[str, str]:
    """The files of `launcher=local`."""
    lines = [stage_command(config, stage) for stage in stages]
    script = _LOCAL.format(cwd=shlex.quote(str(Path.cwd()))) + "\n".join(lines) + "\n"
    return {"config.yaml": frozen_config(config), "run.sh": script}


def read_launch(run_dir: Path) -> tuple[str, Config]:
    """The latest launch of a run folder: the launcher's name, and what it was launched with.

    Raises:
        ValueError: if nothing was launched there.
    """
    files = sorted(run_dir.glob("launch/*/config.yaml"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(
            f"{run_dir} holds no launch: expected the run_dir of `nemo-rod run`, such as runs/toy."
        )
    values = OmegaConf.load(files[-1])
    assert isinstance(values, DictConfig)
    for key in ("defaults", "hydra"):
        del values[key]
    composed = OmegaConf.merge(OmegaConf.structured(Config), values)
    assert isinstance(composed, DictConfig)
    return files[-1].parent.name, to_config(composed)
