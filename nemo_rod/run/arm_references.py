"""The reference losses that an arm scores with: from its own run and from other runs."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.run.handover import Inputs, outputs
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import SPECIALIST, ArmSettings
from nemo_rod.selection.references.folder import Folder


class ArmReferences:
    """The reference losses that an arm scores with, in the folder of its run."""

    def __init__(self, arm: ArmSettings, results: RunFolder) -> None:
        self.results = results
        self.folders = [results.reference(name) for name in arm.own_references]
        self.lent: Path | None = None  # those of another run's specialist
        if arm.scores and arm.variant.reference is not None:
            other = RunFolder(Path(arm.variant.reference), results.recipe)
            self.lent = other.reference("specialist")
            self.folders.append(self.lent)

    def inputs(self) -> Inputs:
        """Returns what determines the losses, by name; refuses a folder that is not there yet."""
        for folder in self.folders:
            outputs(folder, made_by=self.results.command("reference"))
        if self.lent is not None:  # its name dates from a list, and stays for finished arms
            return {"references.0": Folder.open(self.lent).manifest.model}
        return {"specialist": self.results.weights(SPECIALIST)} if self.folders else {}
