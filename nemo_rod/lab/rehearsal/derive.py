"""Computes the configuration of a rehearsal from a resolved recipe.

Sizes, paths and numbers of processes change; every other key stays as in the recipe.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, Optimisation, Parallel, section
from nemo_rod.lab.rehearsal.forms import BLOCK_SIZE
from nemo_rod.lab.rehearsal.made_documents import small_source
from nemo_rod.lab.rehearsal.special_tokens import special_tokens
from nemo_rod.lab.report.section import Report
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.variants import arm_settings

BATCH_SIZE = 8  # blocks; equal in all rehearsals, because one may use the curriculum of another
_SCORING_MICRO_BATCH = 4  # blocks at most
_HELD_OUT_QUESTIONS = 8
# axes in the order in which they are reduced to 1 if there are too few processes
_REDUCED = ("data", "context", "pipeline", "tensor")


class Places:
    """Paths of a rehearsal's own files in its run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # run folder of the rehearsal
        self.made = folder / "made"  # made documents, tokenizers and checkpoint
        self.checkpoint = self.made / "checkpoint"  # the small base model
        self.tasks = self.made / "tasks"  # definitions that replace benchmark tasks

    def tokenizer(self, name: str) -> Path:
        """Returns the folder of another model's tokenizer."""
        return self.made / "tokenizers" / name.replace("/", "--")

    def other(self, run: str) -> Path:
        """Returns the folder for the rehearsal of another run that this one uses."""
        return self.folder / "others" / run.strip("/.").replace("/", "--")


def scaled_down(config: Config, folder: Path, *, parallel: Parallel, scale: float) -> Config:
    """Returns the configuration of a recipe's rehearsal.

    `scale` is its steps over those of the recipe.
    """
    places, small, domain = Places(folder.absolute()), copy.deepcopy(config), config.domain
    specs, tasks, report = domain.specs, section(small, Tasks), section(small, Report)
    small.run_dir, small.parallel, small.rebuild, small.arm = str(places.folder), parallel, [], None
    if config.model.hf is not None:
        small.model.hf, small.model.shape = str(places.checkpoint), None
    if domain.tokenizer != "byte":
        is_own = domain.tokenizer == config.model.hf
        own = places.checkpoint if is_own else places.tokenizer(domain.tokenizer)
        small.domain.tokenizer = str(own)
        if domain.eod is not None:
            tokens = special_tokens(domain.tokenizer)
            small.domain.eod = tokens.small_ids().get(tokens.name_of(domain.eod), domain.eod)
    if tasks.held_out and not any(spec.document_holdout for spec in specs):
        small.domain.holdout_floor = max(domain.holdout_floor or 0, _HELD_OUT_QUESTIONS)
    small.domain.block_size, small.domain.workers = BLOCK_SIZE, min(domain.workers, 2)
    made = {
        spec.name: domain.sources[spec.name]
        | small_source(spec, places.made, block_size=BLOCK_SIZE)
        for spec in specs
    }
    small.domain = dataclasses.replace(small.domain, sources=made)  # parsed anew
    small.train = _schedule(config.train, parallel, scale)
    small.pretrain = config.pretrain and _schedule(config.pretrain, parallel, scale)
    small.scoring.micro_batch_size = min(config.scoring.micro_batch_size, _SCORING_MICRO_BATCH)
    small.checkpoint.every = max(1, small.train.steps // 2)
    small.validation.every = small.train.steps // 2 if config.validation.every else 0
    small.validation.blocks = min(config.validation.blocks, 2)
    small.variants = {n: _variant(v, places, scale) for n, v in config.variants.items()}
    # no memory is planned for the small model
    small.cluster.gpu_memory_gib = small.cluster.node_memory_gib = 0.0
    # a run on several nodes is rehearsed on two
    gpus_per_node = config.cluster.gpus_per_node
    if 0 < gpus_per_node < config.parallel.world_size and parallel.world_size >= 2:
        small.cluster.gpus_per_node = parallel.world_size // 2
    report.seeds, report.settings = [], []
    tasks.limit = min(tasks.limit or _HELD_OUT_QUESTIONS, _HELD_OUT_QUESTIONS)
    tasks.held_out = min(tasks.held_out, _HELD_OUT_QUESTIONS)
    if tasks.capabilities:
        tasks.include = str(places.tasks)
    return small


def _schedule(train: Optimisation, parallel: Parallel, scale: float) -> Optimisation:
    # every replica adds up the gradients of two micro-batches or more, and pipelines stay busy
    most = 2 if parallel.data * parallel.pipeline <= 2 else 1
    return dataclasses.replace(
        train,
        micro_batch_size=min(train.micro_batch_size, most),
        batch_size=BATCH_SIZE,
        **_scaled_steps(dataclasses.asdict(train), scale),
    )


def _variant(variant: Any, places: Places, scale: float) -> dict[str, Any]:
    small = dict(variant or {})
    if small.get("steps") is not None:
        small |= _scaled_steps({"steps": small["steps"]}, scale)
    if small.get("curriculum") is not None:
        run, arm = _run_and_arm(small["curriculum"])
        small["curriculum"] = str(places.other(run) / "arms" / arm)
    if small.get("reference") is not None:
        small["reference"] = str(places.other(small["reference"]))
    for part in ("train", "scoring"):
        if small.get(part):
            keys = {k: v for k, v in small[part].items() if not k.endswith("batch_size")}
            small[part] = keys | _scaled_steps(keys, scale)
    return small


def _scaled_steps(values: dict[str, Any], scale: float) -> dict[str, Any]:
    """Returns the keys of a schedule that count steps, scaled; a warm-up may vanish."""
    least = {"steps": 1, "warmup_steps": 0, "decay_steps": 1}
    return {
        name: max(fewest, round(values[name] * scale))
        for name, fewest in least.items()
        if values.get(name) is not None
    }


def other_runs(config: Config) -> dict[str, list[str]]:
    """Returns the folders of other runs that the recipe's arms use, and the arms used of each."""
    arms: dict[str, list[str]] = {}
    for name in config.arms:
        variant = arm_settings(config, name).variant
        if variant.reference is not None:
            # its specialist's losses are made for an arm that scores
            arms.setdefault(variant.reference, []).extend(["no_replay", "rod"])
        if variant.curriculum is not None:
            run, arm = _run_and_arm(variant.curriculum)
            arms.setdefault(run, []).append(arm)
    return {run: list(dict.fromkeys(names)) for run, names in arms.items()}


def _run_and_arm(folder: str) -> tuple[str, str]:
    """Returns the run and the arm of a folder with a curriculum: RUN or RUN/arms/ARM."""
    run, _, arm = folder.rstrip("/").partition("/arms/")
    return run, arm or "rod"


def small_layout(parallel: Parallel, processes: int | None) -> tuple[Parallel, list[str]]:
    """Returns a layout with every axis above 1 reduced to 2, and the axes that had to become 1.

    `processes` is the largest number that can run; None for no limit.
    """
    axes = ("data", "tensor", "pipeline", "context", "virtual_pipeline", "expert")
    small = dataclasses.replace(parallel)
    for axis in axes:
        setattr(small, axis, min(2, getattr(parallel, axis)))
    for axis in _REDUCED:
        if processes is None or small.world_size <= processes:
            break
        setattr(small, axis, 1)
    if small.pipeline == 1:
        small.virtual_pipeline = 1
    if small.tensor == 1:
        small.sequence = False
    if small.data * small.tensor * small.context % small.expert:
        small.expert = 1
    lost = [axis for axis in axes if getattr(small, axis) < min(2, getattr(parallel, axis))]
    return small, lost
