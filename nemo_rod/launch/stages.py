r"""The stages of a recipe, from raw text to evaluated models.

    prepare -> base -> references/base ----------------------------+
                  \--> no_replay -> references/specialist -> rod --+-> evaluate -> report
                  \--> fixed_<percent>, merge_<lambda> ------------+

A stage's inputs name everything that decides its result. The seed decides an arm's; the parallel
layout decides nothing and is only noted, so that a base and its references serve any layout.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.corpus.shards import write_json
from nemo_rod.jobs import ScoreJob
from nemo_rod.launch.digests import weights_digest
from nemo_rod.launch.folder import RunFolder
from nemo_rod.launch.handover import Inputs, Stage, flatten, outputs
from nemo_rod.launch.model_jobs import ModelJobs
from nemo_rod.selection.arms import arm_kind, merge_weight

SPECIALIST = "no_replay"  # the arm whose losses are the adaptation reference


class Stages:
    """Builds the stages of one recipe in one run folder.

    Args:
        config: the checked configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.results = RunFolder(Path(config.run_dir), config.recipe)
        self.jobs = ModelJobs(config, self.results)

    def all(self) -> list[Stage]:
        """Every stage that the recipe's arms need, in an order that they can run in."""
        kinds = {name: arm_kind(name) for name in self.config.arms if name != "base"}
        selecting = [name for name in kinds if name.startswith("rod")]
        trained = [name for name, kind in kinds.items() if kind == "trained"]
        merged = [name for name, kind in kinds.items() if kind == "merged"]
        stages = [self.prepare(), self.make_base()]
        if selecting:
            stages.append(self.reference("base"))
        if selecting or merged or SPECIALIST in trained:
            stages.append(self.train(SPECIALIST))
        if selecting:
            stages.append(self.reference("specialist"))
        stages += [self.train(name) for name in trained if name != SPECIALIST]
        return stages + [self.merge(name) for name in merged]

    def prepare(self) -> Stage:
        """Text -> blocks."""
        domain = self.config.domain

        def inputs() -> Inputs:
            compared = dataclasses.asdict(domain)
            compared.pop("workers")  # the blocks do not depend on it
            return flatten("domain", compared)

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.launch.prepare import prepare_blocks

            return prepare_blocks(domain, folder)

        return Stage(
            "prepare",
            "prepare",
            self.results.blocks,
            inputs,
            make,
            "text -> blocks",
            runs_model=False,
            checks_itself=True,
        )

    def make_base(self) -> Stage:
        """A base trained here from nothing, or a copy of the pretrained checkpoint's address."""
        model, optimisation = self.config.model, self.config.pretrain

        def inputs() -> Inputs:
            compared = dataclasses.asdict(model)
            compared.pop("shape")  # only the plan reads it
            made_of = flatten("model", compared)
            if model.hf is None:
                assert optimisation is not None
                made_of |= flatten("pretrain", dataclasses.asdict(optimisation))
                made_of |= {"blocks": self.results.block_counts()["digest"]}
            return made_of

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.launch.base import check_tokenizer, initialise_base, resolve_base

            if model.hf is not None:
                resolve_base(model.hf, folder / "hf")
                check_tokenizer(folder / "hf", self.results.blocks)
            else:
                assert optimisation is not None and model.architecture is not None
                initialise_base(
                    model.architecture,
                    folder / "init",
                    tokenizer=self.config.domain.tokenizer,
                    seed=self.config.seed,
                )
                check_tokenizer(folder / "init", self.results.blocks)
                arm = self.jobs.arm("base", optimisation)
                self.jobs.train("base", folder, folder / "init", arm, optimisation, [])
            return {"weights": weights_digest(folder / "hf")}

        title = "the base model" if model.hf else "train the base model from nothing"
        return Stage(
            "base",
            "pretrain",
            self.results.base,
            inputs,
            make,
            title,
            needs=("prepare",),
            runs_model=model.hf is None,
            note=self._note(),
        )

    def reference(self, name: str) -> Stage:
        """Losses of the base on replay, or of the specialist on adaptation."""
        role, arm = {"base": ("replay", "base"), "specialist": ("adaptation", SPECIALIST)}[name]

        def inputs() -> Inputs:
            return {
                "blocks": self.results.block_counts()["digest"],
                "model": self.results.weights(arm),
                "model.precision": self.config.model.precision,
            }

        def make(folder: Path) -> dict[str, Any]:
            job = ScoreJob(
                **self.jobs.common(f"references/{name}", folder),
                model=str(self.results.checkpoint(arm)),
                role=role,
                model_digest=self.results.weights(arm),
            )
            self.jobs.run(job, folder)
            return {}

        return Stage(
            f"references_{name}",
            f"score arm={arm}",
            self.results.reference(name),
            inputs,
            make,
            f"score every {role} block with {'the base' if arm == 'base' else 'the specialist'}",
            needs=("prepare", arm),
            note=self._note(),
        )

    def train(self, name: str) -> Stage:
        """One arm."""
        optimisation = self.jobs.schedule(name)
        references = [self.results.reference(r) for r in ("specialist", "base")]

        def inputs() -> Inputs:
            arm = self.jobs.arm(name, optimisation)
            made_of = {
                "blocks": self.results.block_counts()["digest"],
                "base": self.results.weights("base"),
            }
            made_of |= flatten("arm", dataclasses.asdict(arm))
            made_of |= flatten("train", dataclasses.asdict(optimisation))
            made_of |= {"seed": self.config.seed, "model.precision": self.config.model.precision}
            if arm.policy().needs_scores:
                for folder in references:
                    outputs(folder, made_by=self.results.command("score"))
                made_of |= {"specialist": self.results.weights(SPECIALIST)}
            return made_of

        def make(folder: Path) -> dict[str, Any]:
            arm = self.jobs.arm(name, optimisation)
            used = references if arm.policy().needs_scores else []
            self.jobs.train(name, folder, self.results.checkpoint("base"), arm, optimisation, used)
            self.jobs.describe(folder, name, arm, optimisation)
            return {"weights": weights_digest(folder / "hf")}

        scored = name.startswith("rod")
        return Stage(
            name,
            f"train arm={name}",
            self.results.arm(name),
            inputs,
            make,
            f"train {name}",
            needs=("base", *(("references_base", "references_specialist") if scored else ())),
            note=self._note(),
        )

    def merge(self, name: str) -> Stage:
        """(1 - lambda) base + lambda specialist (paper, appendix B.4)."""
        weight = merge_weight(name)

        def inputs() -> Inputs:
            return {
                "base": self.results.weights("base"),
                "specialist": self.results.weights(SPECIALIST),
                "lambda": weight,
            }

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.evaluation.merging import merge_checkpoints

            merge_checkpoints(
                self.results.checkpoint("base"),
                self.results.checkpoint(SPECIALIST),
                folder / "hf",
                weight,
            )
            specialist = json.loads((self.results.arm(SPECIALIST) / "arm.json").read_text())
            description = {
                **specialist,
                "arm": name,
                "kind": "merged",
                "lambda": weight,
                "pools": None,
                "policy": None,
                "wall_seconds": 0.0,
            }
            write_json(folder / "arm.json", description)
            return {"weights": weights_digest(folder / "hf")}

        title = f"merge base and specialist at {weight:g}"
        return Stage(
            name,
            f"merge arm={name}",
            self.results.arm(name),
            inputs,
            make,
            title,
            needs=("base", SPECIALIST),
            runs_model=False,
        )

    def _note(self) -> dict[str, Any]:
        return {"parallel": dataclasses.asdict(self.config.parallel), "seed": self.config.seed}
