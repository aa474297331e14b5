"""Where the results of a run lie, and what its finished stages say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rod.recipe.handover import outputs


class RunFolder:
    """The folder of one run.

    Args:
        path: of the folder.
        recipe: whose run it is, for the commands that errors name.
    """

    def __init__(self, path: Path, recipe: str) -> None:
        self.path, self.recipe = path, recipe
        self.blocks = path / "blocks"
        self.base = path / "base"

    def arm(self, name: str) -> Path:
        """Where an arm's results are."""
        return self.path / "arms" / name

    def checkpoint(self, name: str) -> Path:
        """The Hugging Face checkpoint of an arm."""
        return (self.base if name == "base" else self.arm(name)) / "hf"

    def reference(self, name: str) -> Path:
        """Reference losses of the "base" or of the "specialist"."""
        return self.path / "references" / name

    def log(self, name: str) -> Path:
        """What the processes of a job print."""
        return self.path / "logs" / f"{name.replace('/', '_')}.log"

    def block_counts(self) -> dict[str, Any]:
        """Digest of the block store and the number of training blocks of each role."""
        return outputs(self.blocks, made_by=self.command("prepare"))

    def weights(self, name: str) -> str:
        """Digest of an arm's weights; refuses, with the command to run, if there are none."""
        if name == "base":
            return outputs(self.base, made_by=self.command("pretrain"))["weights"]
        command = "merge" if name.startswith("merge_") else "train"
        made_by = f"{self.command(command)} arm={name}"
        return outputs(self.arm(name), made_by=made_by)["weights"]

    def command(self, name: str) -> str:
        """The command that makes something of this run."""
        return f"{name} recipe={self.recipe}"
