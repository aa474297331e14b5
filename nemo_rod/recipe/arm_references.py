"""The reference losses that an arm scores with: from its own run and from other runs."""

from __future__ import annotations

from pathlib import Path

from nemo_rod.recipe.handover import Inputs, outputs
from nemo_rod.recipe.run_folder import RunFolder
from nemo_rod.recipe.variants import SPECIALIST, ArmSettings
from nemo_rod.selection.references.folder import open_folder

# References that a run can compute: name -> (model, role of the blocks it scores).
REFERENCES = {
    "base": ("base", "replay"),
    "specialist": (SPECIALIST, "adaptation"),
    "base_adaptation": ("base", "adaptation"),  # if the base counts beside the specialist
    "base_distillation": ("base", "replay"),  # the base's predictions of every token
}


def own_references(arm: ArmSettings) -> list[str]:
    """Returns the keys of `REFERENCES` that the arm's own run computes; none without scoring."""
    if not arm.scores:
        return []
    of_new_blocks = {"specialist": "specialist", "base": "base_adaptation"}
    of_replay = "base_distillation" if arm.distilled else "base"
    return [of_replay, *(of_new_blocks[n] for n in arm.references if n in of_new_blocks)]


class ArmReferences:
    """The reference losses that an arm scores with, in one run folder.

    Args:
        arm: all settings of the arm.
        results: folder of the arm's run.
    """

    def __init__(self, arm: ArmSettings, results: RunFolder) -> None:
        self.arm, self.results = arm, results
        others = [name for name in arm.references if name not in ("specialist", "base")]
        self.own = own_references(arm)
        self.folders = [results.reference(name) for name in self.own]
        if arm.scores:
            self.folders += [self._of_run(name) for name in others]

    def inputs(self) -> Inputs:
        """Returns what determines the losses, by name.

        Raises:
            ValueError: if a folder does not exist yet.
        """
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
        if self.arm.distilled:
            folder = self.results.reference("base_distillation")
            found["replay_score"] = open_folder(folder).manifest.loss
        return found

    def _of_run(self, run: str) -> Path:
        return RunFolder(Path(run), self.results.recipe).reference("specialist")
