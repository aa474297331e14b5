"""The model jobs of a run: creation from its configuration, execution and description."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nemo_rod import parts
from nemo_rod.config import Cluster, Config, Optimisation
from nemo_rod.files import digest, read_lines, share, write_json
from nemo_rod.jobs import Job, ModelJob, TrainJob, write_job
from nemo_rod.run import branches
from nemo_rod.run.handover import outputs
from nemo_rod.run.launch import launcher_of
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.variants import ArmSettings, arm_settings, trained_arms
from nemo_rod.selection import Candidates, Curriculum, replay_share
from nemo_rod.selection.arms import Arm, costs
from nemo_rod.selection.arrays import Mask
from nemo_rod.selection.held_out import Rule
from nemo_rod.selection.policies import reference_roles

AnyJob = TypeVar("AnyJob", bound=ModelJob)
MACHINE_KEYS = ("recompute", "grad_reduce", "precision_aware_optimizer", "optimizer_offload")


class ModelJobs:
    """Writes and runs the jobs of one run, of a checked configuration."""

    def __init__(self, config: Config, results: RunFolder) -> None:
        self.config, self.results = config, results

    def job(
        self, kind: type[AnyJob], name: str, out: Path, config: Config | None = None, **own: Any
    ) -> AnyJob:
        """Returns a job on the run's blocks; `own` are the values that its stage has computed."""
        values = {key.name: getattr(config or self.config, key.name) for key in fields(Config)}
        # processes read no more of the cluster, nor sections of other parts: they may hold secrets
        known = {key: getattr(self.config.cluster, key) for key in ("gpu", "gpus_per_node")}
        config = Config(**values | {"cluster": Cluster(**known)})
        return kind(name=name, config=config, blocks=str(self.results.blocks), out=str(out), **own)

    def run(self, job: Job, folder: Path) -> None:
        """Runs a job, with its file in `folder`."""
        file = folder / "job.json"
        write_job(job, file)
        launcher_of(self.config).run_job(job, file, self.config, self.results.log(job.name))

    def settings(self, name: str) -> ArmSettings:
        """Returns every setting of an arm, with its variant applied."""
        return arm_settings(self.config, name)

    def arm(self, name: str, blocks: dict[str, Any] | None = None) -> Arm:
        """Returns an arm's pools and policy, over the store's blocks or over planned counts.

        Over planned counts, recorded curricula are not read: a share determined by them is assumed
        to be a half, at the same cost.

        Raises:
            ValueError: a curriculum that it needs is missing or does not fit.
        """
        settings, counted = self.settings(name), blocks or self.results.block_counts()
        found: dict[str, Any] = {}
        if isinstance(of := settings.variant.share, str) and blocks is None:
            made_by = f"{self.results.command('train')} arm={of}"
            outputs(folder := self.results.arm(of), made_by=made_by)
            with Curriculum.open(folder / "curriculum.rod", read_only=True) as curriculum:
                found["share"] = replay_share(curriculum)
        elif (file := self.curriculum_file(settings)) is not None:
            if blocks is None:
                refuse_unfit(file, settings, counted["digest"])
            found["recorded"] = str(file)
        return settings.arm(
            num_adaptation=counted["num_adaptation"],
            num_replay=counted["num_replay"],
            seed=self.config.seed,
            **found,
        )

    def reference_mask(self, blocks: dict[str, Any] | None = None) -> Mask:
        """Returns a mask of the blocks that need references, bool [blocks of the store].

        The blocks are those of the store, or planned counts.
        """
        counted = blocks or self.results.block_counts()
        steps: dict[tuple[Candidates, tuple[str, ...]], int] = {}
        for settings in trained_arms(self.config):
            if settings.own_references:
                # depends on its candidates alone, not on recorded shares and curricula
                pools = self.arm(settings.name, counted).candidates
                key = pools, reference_roles(settings.planned_arm.needs)
                steps[key] = max(steps.get(key, 0), settings.train.steps)
        return _drawn_mask(counted["num_adaptation"] + counted["num_replay"], tuple(steps.items()))

    def references(self, arm: ArmSettings) -> list[Path]:
        """Returns the folders of the losses that an arm scores with: its run's, or another's."""
        folders = [self.results.reference(name) for name in arm.own_references]
        other = arm.variant.reference
        if other is not None and "adaptation" in reference_roles(arm.planned_arm.needs):
            folders.append(RunFolder(Path(other), self.results.recipe).reference("specialist"))
        return folders

    def curriculum_file(self, settings: ArmSettings) -> Path | None:
        """Returns the file of the curriculum that an arm trains on; None if there is none."""
        variant = settings.variant
        if variant.follow is not None:
            return self.results.arm(variant.follow) / "curriculum.rod"
        if variant.curriculum is None:
            return None
        folder = Path(variant.curriculum)
        if folder.parent.name == "arms" or (folder / "curriculum.rod").exists():
            return folder / "curriculum.rod"
        return folder / "arms" / "rod" / "curriculum.rod"

    def convergence(self, arm: Arm) -> Rule | None:
        """Returns the rule by which an arm may end early; None if it does not."""
        if not self.settings(arm.name).variant.converge:
            return None
        rule = self.config.convergence
        decay_steps = round(rule.decay_epochs * arm.candidates.epoch_size / arm.batch_size)
        return Rule(rule.tolerance, rule.patience, max(1, decay_steps))

    def train(self, folder: Path, model: Path, arm: Arm, used: list[Path]) -> None:
        """Trains an arm from `model` into `folder`, with the given reference folders."""
        settings, rule = self.settings(arm.name), self.convergence(arm)
        optimisation = settings.train
        if rule is not None:  # same length of the decay, whenever it begins
            decay = min(rule.decay_steps, optimisation.steps)
            optimisation = dataclasses.replace(optimisation, decay_steps=decay)
        scoring = settings.scoring
        if not settings.scores:  # its precision is that of a pass
            scoring = dataclasses.replace(scoring, precision=None)
        decides = {"arm": arm.inputs(), "train": schedule_inputs(optimisation)}
        if rule is not None:
            decides["convergence"] = dataclasses.asdict(rule)
        job = self.job(
            TrainJob,
            arm.name,
            folder,
            config=dataclasses.replace(
                self.config, train=optimisation, selection=settings.selection, scoring=scoring
            ),
            start=str(model),
            arm=arm,
            references=[str(reference) for reference in used],
            config_digest=digest(json.dumps(decides, sort_keys=True).encode()),
            convergence=rule,
        )
        if settings.trunk is not None:
            trunk = self.results.arm(settings.trunk)
            branches.begin(folder, trunk, settings.variant.at or 0, job.config_digest)
        self.run(job, folder)
        share((folder / "hf").glob("*.safetensors"))

    def describe(self, folder: Path, arm: Arm) -> None:
        """Writes `arm.json`: the arm, what its variant names, and its cost, for the report."""
        settings, rule = self.settings(arm.name), self.convergence(arm)
        rows = read_lines(folder / "metrics.jsonl")
        steps, block_size = len(rows), self.config.domain.block_size
        scored_tokens = arm.scored_blocks * block_size
        # of other models, which read the replay blocks, too
        if passes := sum(parts.load("terms", name).passes for name in settings.train.terms):
            with Curriculum.open(folder / "curriculum.rod", read_only=True) as curriculum:
                scored_tokens += passes * replay_share(curriculum) * arm.batch_size * block_size
        description = {
            **dataclasses.asdict(arm),
            "kind": "trained",
            "budget": steps / self.config.train.steps,
            "convergence": dataclasses.asdict(rule) if rule else None,
            "references": [arm.reference or name for name in settings.own_references][-1:],
            "scoring": dataclasses.asdict(settings.scoring) if settings.scores else None,
            "train": dataclasses.asdict(settings.train),
            **costs(
                steps=steps,
                batch_size=arm.batch_size,
                block_size=block_size,
                scored_tokens=scored_tokens,
            ),
            "wall_seconds": sum(row["timing/train/total"] for row in rows),
        }
        write_json(folder / "arm.json", description)


def schedule_inputs(optimisation: Optimisation) -> dict[str, Any]:
    """Returns the schedule settings that affect the result.

    Like the layout, settings that save memory may change between two attempts. Keys that are not
    set are left out, as if they did not exist.
    """
    values = dataclasses.asdict(optimisation)
    kept = {key: value for key, value in values.items() if value not in (None, {})}
    return {key: value for key, value in kept.items() if key not in MACHINE_KEYS}


def refuse_unfit(file: Path, settings: ArmSettings, store: str | None) -> None:
    """Refuses, before any training, a curriculum that does not fit the arm, and known blocks."""
    where = f"variants.{settings.name}"
    if not file.exists():
        raise ValueError(f"{file} is not there yet, but {where} needs it: record it first.")
    steps, batch_size = settings.train.steps, settings.train.batch_size
    with Curriculum.open(file, read_only=True) as curriculum:
        header = curriculum.header
        for wrong, what, has, needs, cure in (
            (store not in (None, header.store), "block store", header.store, store,
             "prepare the same blocks for both runs"),
            (header.num_chosen != batch_size, "batches of", header.num_chosen, batch_size,
             f"set {where}.train.batch_size to the recorded one"),
            (curriculum.next_step < steps, "steps", curriculum.next_step, steps,
             f"set {where}.steps to the recorded number, or to fewer"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(
                    f"{file} was recorded with {what} {has}, but {where} has {needs}: {cure}."
                )


@functools.lru_cache(maxsize=8)  # every plan, and every check of a reference stage, calls it
def _drawn_mask(
    num_blocks: int, pools: tuple[tuple[tuple[Candidates, tuple[str, ...]], int], ...]
) -> Mask:
    """Returns a mask of blocks of some roles in first steps, bool [blocks], read-only."""
    drawn = np.zeros(num_blocks, dtype=bool)
    for (candidates, roles), steps in pools:
        drawn |= candidates.drawn(steps, roles)
    drawn.flags.writeable = False
    return drawn
