"""Commands, and recipes as the command line composes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import flag_override

from nemo_rod.config import Config, config_class, config_folder
from nemo_rod.run.checks import to_config

RECIPES = sorted(file.stem for file in (config_folder() / "recipe").glob("*.yaml"))
OF_THE_PAPER = [name for name in RECIPES if not name.startswith("toy")]


def composed(*overrides: str) -> Config:
    ConfigStore.instance().store(name="schema", node=config_class())
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with flag_override(config, "struct", False):
            del config["hydra"]
        return to_config(config)


def nemo_rod(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nemo_rod.cli", *arguments], capture_output=True, text=True, cwd=cwd
    )
