r"""The stages of a recipe, from raw text to evaluated models.

    prepare -> base -> references/base ----------------------------+
                  \--> no_replay -> references/specialist -> rod --+-> evaluate -> report
                  \--> fixed_<percent>, merge_<lambda> ------------+

A variant needs its parent's inputs and the arm that it follows or branches off.

A stage's inputs name everything that determines its result. The seed is an input of every arm;
the parallel layout is recorded but not compared: a base and its references serve any layout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod import parts
from nemo_rod.config import Config
from nemo_rod.files import flat, refuse_links, writing
from nemo_rod.jobs import ReferenceJob
from nemo_rod.run.base_model import checkpoint_digest
from nemo_rod.run.handover import HandOver, Inputs, Stage, in_order, outputs
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.model_jobs import ModelJobs, schedule_inputs
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import REFERENCES, SPECIALIST, scored_lengths, trained_arms
from nemo_rod.selection.references.folder import Folder


class Stages:
    """Builds the stages of one checked recipe in one run folder."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.results = RunFolder(Path(config.run_dir), config.recipe)
        self.jobs = ModelJobs(config, self.results)
        self.launcher = launcher_of(config)

    def all(self) -> list[Stage]:
        """Returns every stage of the recipe, in an order in which they can run."""
        others = [stage for name in parts.names("stages") for stage in self.part(name)]
        stages = [*self.models(), *others]
        fed = {s.name: tuple(o.name for o in others if o.feeds == s.name) for s in stages}
        return in_order([dataclasses.replace(s, needs=s.needs + fed[s.name]) for s in stages])

    def part(self, name: str) -> list[Stage]:
        """Returns the stages of a registered part."""
        stages: list[Stage] = parts.load("stages", name)(self)
        return stages

    def models(self) -> list[Stage]:
        """Returns every stage up to the models that the recipe trains."""
        trained = trained_arms(self.config)
        used = {name for arm in trained for name in arm.own_references}
        stages = [self.prepare(), self.make_base()]
        if "base" in used:
            stages.append(self.reference("base"))
        if SPECIALIST in (arm.name for arm in trained):
            stages.append(self.train(SPECIALIST))
        if "specialist" in used:
            stages.append(self.reference("specialist"))
        return stages + [self.train(arm.name) for arm in trained if arm.name != SPECIALIST]

    def prepare(self) -> Stage:
        """Returns the stage from text to blocks."""
        domain = self.config.domain

        def inputs() -> Inputs:
            compared = dataclasses.asdict(domain)
            compared.pop("workers")  # the blocks do not depend on it
            return flat({"domain": compared})

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.run.prepared_blocks import prepare_blocks

            trusted = self.config.model.trust_remote_code
            return prepare_blocks(domain, folder, trust_remote_code=trusted)

        blocks = HandOver(
            "prepare",
            self.results.blocks,
            inputs,
            make,
            checks_itself=True,
            proof=("manifest.json", "store.json"),
        )
        stage = blocks.stage("prepare", "text -> blocks", runs_model=False, extra="data")

        def is_done() -> bool:
            if done := blocks.is_done():
                from nemo_rod.run.prepared_blocks import refuse_other_files

                refuse_other_files(domain, self.results.blocks)
            return done

        return dataclasses.replace(stage, is_done=is_done)

    def make_base(self) -> Stage:
        """Returns the stage of the base: trained here, or a link to the pretrained checkpoint."""
        model, optimisation = self.config.model, self.config.pretrain

        def inputs() -> Inputs:
            compared = dataclasses.asdict(model)
            # read by the plan; how it is loaded; how fast it runs
            for key in ("shape", "trust_remote_code", "provider"):
                compared.pop(key)
            if model.special_tokens == "same":
                compared.pop("special_tokens")
            made_of = flat({"model": compared})
            if model.hf is None:
                assert optimisation is not None
                made_of |= flat({"pretrain": schedule_inputs(optimisation)})
                made_of |= {"blocks": self.results.block_counts()["digest"]}
            return made_of

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.run.base_model import check_base, commit_of, initialise_base, resolve_base

            domain, blocks = self.config.domain, self.results.blocks
            if model.hf is not None:
                resolve_base(model.hf, folder / "hf")
                check_base(folder / "hf", blocks, model, domain)
            else:
                assert model.architecture is not None
                initialise_base(
                    model.architecture,
                    folder / "init",
                    tokenizer=domain.tokenizer,
                    seed=self.config.seed,
                    eod=domain.eod,
                )
                check_base(folder / "init", blocks, model, domain)
                self.jobs.train(folder, folder / "init", self.jobs.arm("base"), [])
            made = {"weights": checkpoint_digest(folder / "hf")}
            commit = commit_of(folder / "hf")
            return made if commit is None else {**made, "commit": commit}

        return HandOver("base", self.results.base, inputs, make, self._note()).stage(
            "pretrain",
            "the base model" if model.hf else "train the base model from nothing",
            needs=("prepare",),
            runs_model=model.hf is None,
            void=measured_files(self.results.arm("base")),
        )

    def reference(self, name: str) -> Stage:
        """Returns the stage that scores all blocks of one role with one model (`REFERENCES`)."""
        arm, role = REFERENCES[name]
        precision, lengths = self.config.scoring.precision, scored_lengths(self.config)

        def inputs() -> Inputs:
            made_of: Inputs = {
                "blocks": self.results.block_counts()["digest"],
                "model": self.results.weights(arm),
                "model.precision": self.config.model.precision,
            }
            if precision is not None:
                made_of["scoring.precision"] = precision
            return made_of | self.launcher.inputs(self.config, scoring=True)

        def make(folder: Path) -> dict[str, Any]:
            self.check_pretrained()
            with writing(wanted := folder / "wanted.npy"):
                np.save(wanted, self.jobs.reference_mask())
            job = self.jobs.job(
                ReferenceJob,
                f"references/{name}",
                folder,
                start=str(self.results.checkpoint(arm)),
                role=role,
                model_digest=self.results.weights(arm),
                lengths=lengths,
                wanted=str(folder / "wanted.npy"),
            )
            self.jobs.run(job, folder)
            (folder / "wanted.npy").unlink()
            return {}

        title = f"score {role} blocks with {'the base' if arm == 'base' else 'the specialist'}"
        folder = self.results.reference(name)
        stage = HandOver(f"references_{name}", folder, inputs, make, self._note()).stage(
            f"reference arm={arm}", title, needs=("prepare", arm)
        )

        def is_done() -> bool:
            if not stage.is_done():
                return False
            references = Folder.open(folder)
            manifest = references.manifest
            if lacking := [n for n in lengths if n not in manifest.lengths]:
                raise ValueError(
                    f"{folder} has losses over the first {', '.join(map(str, manifest.lengths))} "
                    f"tokens of a block, not {lacking[0]}, as scoring.prefix asks for: add "
                    f"rebuild=[references_{name}] to score again, or choose another run_dir."
                )
            drawn = self.jobs.reference_mask()[manifest.start : manifest.stop]
            return bool(references.present()[drawn].all())

        def run() -> None:
            if stage.is_there():  # another arm, seed or length of the run draws more
                refuse_links(folder)
                make(folder)
            else:
                stage.run()

        return dataclasses.replace(stage, is_done=is_done, run=run)

    def train(self, name: str) -> Stage:
        """Returns the stage that trains an arm."""
        settings = self.jobs.settings(name)
        references = self.jobs.references(settings)

        def inputs() -> Inputs:
            made_of = {
                "blocks": self.results.block_counts()["digest"],
                "base": self.results.weights("base"),
            }
            arm = self.jobs.arm(name)
            made_of |= flat({"arm": arm.inputs()})
            if settings.trunk is not None:
                made_of |= {"at": settings.variant.at, "of": self.results.weights(settings.trunk)}
            if (rule := self.jobs.convergence(arm)) is not None:
                made_of |= flat({"convergence": dataclasses.asdict(rule)})
                made_of |= flat({"validation": dataclasses.asdict(self.config.validation)})
            made_of |= flat({"train": schedule_inputs(settings.train)})
            made_of |= {"seed": self.config.seed, "model.precision": self.config.model.precision}
            if settings.scores and settings.scoring.precision is not None:
                made_of["scoring.precision"] = settings.scoring.precision
            for folder in references:
                outputs(folder, made_by=self.results.command("reference"))
            if len(references) > len(settings.own_references):  # the last is of another run
                made_of["reference"] = Folder.open(references[-1]).manifest.model
            elif "specialist" in settings.own_references:
                made_of["specialist"] = self.results.weights(SPECIALIST)
            return made_of | self.launcher.inputs(self.config, scoring=False)

        def make(folder: Path) -> dict[str, Any]:
            self.check_pretrained()
            arm, start = self.jobs.arm(name), self.results.checkpoint("base")
            self.jobs.train(folder, start, arm, references)
            self.jobs.describe(folder, arm)
            return {"weights": checkpoint_digest(folder / "hf")}

        needs = [f"references_{name}" for name in settings.own_references]
        if settings.waits_for is not None:
            needs.append(settings.waits_for)
        return HandOver(name, self.results.arm(name), inputs, make, self._note()).stage(
            f"train arm={name}", f"train {name}", needs=("base", *needs)
        )

    def check_pretrained(self) -> None:
        """Refuses a pretrained base whose tokenizer is no longer that of the blocks.

        Its weights do not depend on the blocks, so it stays when they are prepared again.
        """
        from nemo_rod.run.base_model import check_tokenizer

        model, blocks = self.config.model, self.results.blocks
        if model.hf is not None:
            check_tokenizer(self.results.checkpoint("base"), blocks, model, self.config.domain)

    def _note(self) -> dict[str, Any]:
        return {"parallel": dataclasses.asdict(self.config.parallel), "seed": self.config.seed}


def measured_files(folder: Path) -> tuple[Path, ...]:
    """Returns the results of a model, finished or not; they are void once it is made again."""
    measurements = parts.load_all("measurements")
    return tuple(folder / file for m in measurements for file in (m.FILE, *m.PARTIAL))
