"""The reference losses that an arm scores with: from its own run and from other runs."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.run.handover import Inputs, outputs
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import REFERENCES, SPECIALIST, ArmSettings
from nemo_rod.selection.references.folder import open_folder


class ArmReferences:
    """The reference losses that an arm scores with, in the folder of its run."""

    def __init__(self, arm: ArmSettings, results: RunFolder) -> None:
        self.arm, self.results = arm, results
        others = [name for name in arm.references if name not in ("specialist", "base")]
        self.folders = [results.reference(name) for name in arm.own_references]
        if arm.scores:
            self.folders += [self._of_run(name) for name in others]

    def inputs(self) -> Inputs:
        """Returns what determines the losses, by name; refuses a folder that is not there yet."""
        for folder in self.folders:
            outputs(folder, made_by=self.results.command("reference"))
        if not self.folders:
            return {}
        found: Inputs = {}
        for number, name in enumerate(self.arm.references):
            if name == "specialist":
                found[name] = self.results.weights(SPECIALIST)
            elif name == "base":
                found["lowest with base"] = self.results.weights("base")
            else:
                found[f"references.{number}"] = open_folder(self._of_run(name)).manifest.model
        for name in self.arm.own_references:
            if REFERENCES[name].predictions:
                found["replay_score"] = open_folder(self.results.reference(name)).manifest.loss
        return found

    def _of_run(self, run: str) -> Path:
        return RunFolder(Path(run), self.results.recipe).reference("specialist")
