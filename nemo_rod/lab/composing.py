"""The configuration of a recipe for a command that is not one of Hydra's."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import flag_override

from nemo_rod.config import Config
from nemo_rod.installation import config_folder
from nemo_rod.run.checks import declare_keys, to_config


def compose_config(*overrides: str, folder: Path | None = None) -> Config:
    """Returns the checked configuration of overrides, as a command would compose it.

    `folder` holds groups of the user's own, as of --config-dir.
    """
    declare_keys()
    path = [] if folder is None else [f"hydra.searchpath=[file://{folder.absolute()}]"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides=[*overrides, *path], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with flag_override(config, "struct", False):
            del config["hydra"]
        return to_config(config)
