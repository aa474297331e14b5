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

from nemo_rod.config import Config, Optimisation
from nemo_rod.corpus.shards import write_json
from nemo_rod.jobs import Job, ScoreJob, TrainJob, write_job
from nemo_rod.launch.digests import digest, weights_digest
from nemo_rod.launch.handover import Inputs, Stage, flatten, outputs
from nemo_rod.launch.local import run_job
from nemo_rod.launch.nemo_rl import run_on_nemo_rl
from nemo_rod.selection.arms import Arm, arm_kind, make_arm, merge_weight

SPECIALIST = "no_replay"  # the arm whose losses are the adaptation reference


class Stages:
    """Builds the stages of one recipe in one run folder.

    Args:
        config: the checked configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.blocks = self.run_dir / "blocks"
        self.base = self.run_dir / "base"

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

    def arm_folder(self, name: str) -> Path:
        """Where an arm's results are."""
        return self.run_dir / "arms" / name

    def checkpoint(self, name: str) -> Path:
        """The Hugging Face checkpoint of an arm."""
        return (self.base if name == "base" else self.arm_folder(name)) / "hf"

    # The stages ------------------------------------------------------------------------------

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
            self.blocks,
            inputs,
            make,
            "text -> blocks",
            checks_itself=True,
        )

    def make_base(self) -> Stage:
        """A base trained here from nothing, or a copy of the pretrained checkpoint's address."""
        model, optimisation = self.config.model, self.config.pretrain

        def inputs() -> Inputs:
            made_of = flatten("model", dataclasses.asdict(model))
            if model.hf is None:
                assert optimisation is not None
                made_of |= flatten("pretrain", dataclasses.asdict(optimisation))
                made_of |= {"blocks": self.block_counts()["digest"]}
            return made_of

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.launch.base import check_tokenizer, initialise_base, resolve_base

            if model.hf is not None:
                resolve_base(model.hf, folder / "hf")
                check_tokenizer(folder / "hf", self.blocks)
            else:
                assert optimisation is not None and model.architecture is not None
                initialise_base(
                    model.architecture,
                    folder / "init",
                    tokenizer=self.config.domain.tokenizer,
                    seed=self.config.seed,
                )
                check_tokenizer(folder / "init", self.blocks)
                arm = self._arm("base", optimisation)
                self._run_training("base", folder, folder / "init", arm, optimisation, [])
            return {"weights": weights_digest(folder / "hf")}

        title = "the base model" if model.hf else "train the base model from nothing"
        return Stage("base", "pretrain", self.base, inputs, make, title, self._note())

    def reference(self, name: str) -> Stage:
        """Losses of the base on replay, or of the specialist on adaptation."""
        role, arm = {"base": ("replay", "base"), "specialist": ("adaptation", SPECIALIST)}[name]

        def inputs() -> Inputs:
            return {
                "blocks": self.block_counts()["digest"],
                "model": self.weights(arm),
                "model.precision": self.config.model.precision,
            }

        def make(folder: Path) -> dict[str, Any]:
            job = ScoreJob(
                **self.model_job(f"references/{name}", folder),
                model=str(self.checkpoint(arm)),
                role=role,
                model_digest=self.weights(arm),
            )
            self.run(job, folder)
            return {}

        return Stage(
            f"references_{name}",
            "score",
            self.run_dir / "references" / name,
            inputs,
            make,
            f"score every {role} block with {'the base' if arm == 'base' else 'the specialist'}",
            self._note(),
        )

    def train(self, name: str) -> Stage:
        """One arm."""
        optimisation = self._schedule(name)
        references = [self.run_dir / "references" / r for r in ("specialist", "base")]

        def inputs() -> Inputs:
            arm = self._arm(name, optimisation)
            made_of = {"blocks": self.block_counts()["digest"], "base": self.weights("base")}
            made_of |= flatten("arm", dataclasses.asdict(arm))
            made_of |= flatten("train", dataclasses.asdict(optimisation))
            made_of |= {"seed": self.config.seed, "model.precision": self.config.model.precision}
            if arm.policy().needs_scores:
                for folder in references:
                    outputs(folder, made_by=self._command("score"))
                made_of |= {"specialist": self.weights(SPECIALIST)}
            return made_of

        def make(folder: Path) -> dict[str, Any]:
            arm = self._arm(name, optimisation)
            used = references if arm.policy().needs_scores else []
            self._run_training(name, folder, self.checkpoint("base"), arm, optimisation, used)
            self._describe(folder, name, arm, optimisation)
            return {"weights": weights_digest(folder / "hf")}

        return Stage(
            name, "train", self.arm_folder(name), inputs, make, f"train {name}", self._note()
        )

    def merge(self, name: str) -> Stage:
        """(1 - lambda) base + lambda specialist (paper, appendix B.4)."""
        weight = merge_weight(name)

        def inputs() -> Inputs:
            return {
                "base": self.weights("base"),
                "specialist": self.weights(SPECIALIST),
                "lambda": weight,
            }

        def make(folder: Path) -> dict[str, Any]:
            from nemo_rod.evaluation.merging import merge_checkpoints

            merge_checkpoints(
                self.checkpoint("base"), self.checkpoint(SPECIALIST), folder / "hf", weight
            )
            specialist = json.loads((self.arm_folder(SPECIALIST) / "arm.json").read_text())
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
        return Stage(name, "merge", self.arm_folder(name), inputs, make, title)

    # What they share -------------------------------------------------------------------------

    def _run_training(
        self,
        name: str,
        folder: Path,
        model: Path,
        arm: Arm,
        optimisation: Optimisation,
        references: list[Path],
    ) -> None:
        decides = {"arm": dataclasses.asdict(arm), "train": dataclasses.asdict(optimisation)}
        job = TrainJob(
            **self.model_job(name, folder),
            model=str(model),
            arm=dataclasses.asdict(arm),
            optimisation=optimisation,
            references=[str(reference) for reference in references],
            on_nonfinite=self.config.selection.on_nonfinite,
            checkpoint_every=self.config.checkpoint.every,
            checkpoint_keep=self.config.checkpoint.keep,
            validation_every=self.config.validation.every,
            validation_blocks=self.config.validation.blocks,
            config_digest=digest(json.dumps(decides, sort_keys=True).encode()),
        )
        self.run(job, folder)

    def model_job(self, name: str, out: Path) -> dict[str, Any]:
        """What every job of this run is told."""
        return {
            "name": name,
            "blocks": str(self.blocks),
            "out": str(out),
            "parallel": self.config.parallel,
            "precision": self.config.model.precision,
            "scoring_micro_batch_size": self.config.scoring.micro_batch_size,
            "seed": self.config.seed,
            "stall_seconds": self.config.launcher.stall_seconds,
        }

    def run(self, job: Job, folder: Path) -> None:
        """Runs a job whose file goes into `folder`."""
        file = folder / "job.json"
        write_job(job, file)
        if self.config.launcher.kind == "nemo_rl":
            run_on_nemo_rl(job, self.config)
            return
        log = self.run_dir / "logs" / f"{job.name.replace('/', '_')}.log"
        world_size = self.config.parallel.world_size
        run_job(file, world_size=world_size, launcher=self.config.launcher, log=log)

    def _schedule(self, name: str) -> Optimisation:
        """The arm's own number of steps; all else is the same for all arms."""
        train = self.config.train
        if name != "rod_compute_matched":
            return train
        # as many plain steps' worth of compute as a fixed-replay arm, scoring included
        per_step = 1 + self.config.selection.multiplier / 3
        return dataclasses.replace(train, steps=round(train.steps / per_step))

    def _arm(self, name: str, optimisation: Optimisation) -> Arm:
        selection, blocks = self.config.selection, self.block_counts()
        return make_arm(
            name,
            num_adaptation=blocks["num_adaptation"],
            num_replay=blocks["num_replay"],
            batch_size=optimisation.batch_size,
            multiplier=selection.multiplier,
            balance=selection.balance,  # type: ignore[arg-type]
            kappa=selection.kappa,
            seed=self.config.seed,
        )

    def _describe(self, folder: Path, name: str, arm: Arm, optimisation: Optimisation) -> None:
        """`arm.json`: what the run was and what it cost, for the report."""
        steps, scores = optimisation.steps, arm.policy().needs_scores
        block_size = self.config.domain.block_size
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        description = {
            "arm": name,
            "kind": "trained",
            "seed": self.config.seed,
            "steps": steps,
            "batch_size": optimisation.batch_size,
            "block_size": block_size,
            "multiplier": arm.multiplier,
            "pools": arm.balance,
            "policy": type(arm.policy()).__name__,
            "trained_tokens": steps * optimisation.batch_size * block_size,
            "scored_tokens": steps * arm.pools().size * block_size if scores else 0,
            "compute": arm.compute(steps),
            "wall_seconds": sum(row["timing/train/total"] for row in rows),
        }
        write_json(folder / "arm.json", description)

    def block_counts(self) -> dict[str, Any]:
        """Digest of the block store and the number of training blocks of each role."""
        return outputs(self.blocks, made_by=self._command("prepare"))

    def weights(self, name: str) -> str:
        """Digest of an arm's weights; refuses, with the command to run, if there are none."""
        if name == "base":
            return outputs(self.base, made_by=self._command("pretrain"))["weights"]
        command = "merge" if arm_kind(name) == "merged" else "train"
        made_by = f"{self._command(command)} arm={name}"
        return outputs(self.arm_folder(name), made_by=made_by)["weights"]

    def _command(self, name: str) -> str:
        return f"{name} recipe={self.config.recipe}"

    def _note(self) -> dict[str, Any]:
        return {"parallel": dataclasses.asdict(self.config.parallel), "seed": self.config.seed}
