"""The folder layout of a run, and the outputs of its finished stages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from nemo_rod.files import check_name
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.handover import Inputs, outputs
from nemo_rod.run.launch.render import config_dir


class RunFolder:
    """The folder of one run; the commands in its errors name the recipe."""

    def __init__(self, path: Path, recipe: str) -> None:
        for part in recipe.split("/"):  # a recipe may lie in a subfolder
            check_name("recipe", part)
        self.path, self.recipe = path, recipe
        self.blocks = path / "blocks"
        self.base = path / "base"

    def arm(self, name: str) -> Path:
        """Returns the folder of an arm's results."""
        return self.path / "arms" / name

    def checkpoint(self, name: str) -> Path:
        """Returns the Hugging Face checkpoint of an arm.

        Raises:
            ValueError: that of the base is a link, to weights that were replaced since.
        """
        manifest = self.base / "manifest.json"
        folder = (self.base if name == "base" else self.arm(name)) / "hf"
        if name == "base" and folder.is_symlink() and manifest.exists():
            made, files = manifest.stat().st_mtime, folder.glob("*.safetensors")
            is_newer = any(file.stat().st_ctime > made for file in files)
            if is_newer and checkpoint_digest(folder) != self.weights(name):
                raise ValueError(
                    f"{folder.resolve()}: its weights changed since {self.base} was made of it: "
                    "restore them, add rebuild=[base], or choose another run_dir"
                )
        return folder

    def reference(self, name: str) -> Path:
        """Returns the folder of a reference, named as in `REFERENCES`."""
        return self.path / "references" / name

    def log(self, name: str) -> Path:
        """Returns the log of a job's processes."""
        return self.path / "logs" / f"{name.replace('/', '_')}.log"

    def block_counts(self) -> dict[str, Any]:
        """Returns the block store's digest and the number of training blocks of each role."""
        keys = {"digest": str, "num_adaptation": int, "num_replay": int}
        return outputs(self.blocks, made_by=self.command("prepare"), keys=keys)

    def weights(self, name: str) -> str:
        """Returns the digest of an arm's weights.

        Raises:
            ValueError: the weights are missing; the message has the command that makes them.
        """
        if name == "base":
            folder, made_by = self.base, self.command("pretrain")
        else:
            command = "merge" if name.startswith("merge_") else "train"
            folder, made_by = self.arm(name), f"{self.command(command)} arm={name}"
        return outputs(folder, made_by=made_by, keys={"weights": str})["weights"]

    def measured(self, name: str) -> Inputs:
        """Returns the inputs of the measurements of an arm."""
        return {"model": self.weights(name), "blocks": self.block_counts()["digest"]}

    def command(self, name: str) -> str:
        """Returns a command line for this recipe and folder."""
        words = [*name.split(), *config_dir(), f"recipe={self.recipe}"]
        if self.path.absolute() != Path("runs", self.recipe).absolute():
            is_plain = re.fullmatch(r"[\w./+ -]+", str(self.path), re.ASCII)  # to Hydra
            words.append(f"run_dir={self.path}" if is_plain else f"run_dir='{self.path}'")
        return shlex.join(words)
