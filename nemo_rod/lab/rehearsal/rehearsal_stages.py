"""The stages of a rehearsal: the recipe's own, between making what it reads and a comparison."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from nemo_rod.config import Config
from nemo_rod.files import write_json
from nemo_rod.jobs import CheckJob
from nemo_rod.lab.rehearsal.derive import Places
from nemo_rod.lab.rehearsal.materials import make_materials
from nemo_rod.run.handover import Stage
from nemo_rod.run.processes.torchrun import refuse_bad_ending, run_process
from nemo_rod.run.stages import Stages


class RehearsalStages:
    """Builds the stages of a rehearsal.

    Args:
        config: the rehearsal's own configuration (`derive.rehearsal_of`).
    """

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, Path(config.run_dir)
        self.places, self.stages = Places(self.folder), Stages(config)

    def all(self) -> list[Stage]:
        """Returns every stage, in an order in which they can run."""
        materials, (prepare, *others) = self.materials(), self.stages.all()
        before = [materials, _after(prepare, materials)]
        if self.config.model.hf is not None and self.stages.launcher.bridge:
            before.append(self.model())
        return [*before, *(_after(stage, *before) for stage in others), self.losses()]

    def part(self, name: str) -> Stage:
        """Returns one of the rehearsal's own stages."""
        parts = {"materials": self.materials, "model": self.model, "losses": self.losses}
        return parts[name]()

    def materials(self) -> Stage:
        """Returns the stage that makes documents, tokenizers and the base in small."""

        def make() -> None:
            make_materials(self.folder)
            write_json(self.places.made / "manifest.json", {})

        title = "documents, tokenizer and base in small"
        return self._stage("materials", title, self.places.made / "manifest.json", make)

    def model(self) -> Stage:
        """Returns the stage that builds the model as training would."""
        folder = self.folder / "model"

        def build() -> None:
            folder.mkdir(exist_ok=True)
            job = CheckJob(
                **self.stages.jobs.common("model", folder), model=str(self.places.checkpoint)
            )
            self.stages.jobs.run(job, folder)

        title = "build the model in its layout"
        return self._stage(
            "model", title, folder / "model.json", build, needs=("prepare",), runs_model=True
        )

    def losses(self) -> Stage:
        """Returns the stage that compares the losses of every export with Hugging Face's."""
        out = self.folder / "losses" / "losses.json"

        def compare() -> None:
            out.parent.mkdir(exist_ok=True)
            file = out.with_name("job.json")
            job = {
                "run_dir": str(self.folder),
                "arms": ["base", *(name for name in self.config.arms if name != "base")],
                "recipe": self.config.recipe,
                "precision": self.config.model.precision,
                "out": str(out),
            }
            write_json(file, job)
            log = self.stages.results.log("losses")
            command = [sys.executable, "-m", "nemo_rod.lab.rehearsal", str(file)]
            refuse_bad_ending([run_process(command, log, self.config.launcher)], log)

        title = "compare with Hugging Face's losses of the exports"
        return self._stage("losses", title, out, compare, needs=("evaluate",), runs_model=True)

    def _stage(
        self,
        name: str,
        title: str,
        proof: Path,
        run: Callable[[], None],
        *,
        needs: tuple[str, ...] = (),
        runs_model: bool = False,
    ) -> Stage:
        return Stage(
            name=name,
            command=f"rehearse rehearsal.part={name}",
            title=title,
            folder=proof.parent,
            proof=(proof,),
            is_done=proof.exists,
            run=run,
            needs=needs,
            runs_model=runs_model,
        )


def _after(stage: Stage, *others: Stage) -> Stage:
    names = dict.fromkeys([*stage.needs, *(other.name for other in others)])
    return dataclasses.replace(stage, needs=tuple(names))
