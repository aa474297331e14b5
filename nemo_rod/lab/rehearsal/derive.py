"""Computes the configuration of a rehearsal or a probe from a resolved recipe.

Steps, caps of the sources and the folder change; for a small model also sizes and processes. Every
other key stays as in the recipe.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, Optimisation, Parallel, section
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.rehearsal.forms import BLOCK_SIZE
from nemo_rod.lab.report.section import Report
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.variants import arm_settings, trained_arms

BATCH_SIZE = 8  # blocks; equal in all rehearsals, because one may use the curriculum of another
_SCORING_MICRO_BATCH = 4  # blocks at most
_HELD_OUT_QUESTIONS = 8
# axes in the order in which they are reduced to 1 if there are too few processes
_REDUCED = ("data", "context", "pipeline", "tensor")


# of a rehearsal, in its folder: the small base with a tokenizer, and definitions of lm-eval's tasks
CHECKPOINT, TASKS = "made/checkpoint", "made/tasks"


def folder_of_other(folder: Path, run: str) -> Path:
    """Returns the folder for the rehearsal of another run that a rehearsal uses."""
    return folder / "others" / run.strip("/.").replace("/", "--")


def cut_short(config: Config, folder: Path, *, scale: float) -> Config:
    """Returns the recipe with fewer steps in another folder; `scale` is their share.

    `cap_sources` then takes no more text than these can use.
    """
    folder, small = folder.absolute(), copy.deepcopy(config)
    small.run_dir, small.rebuild, small.arm = str(folder), [], None
    small.train = _scale_schedule(config.train, scale)
    small.pretrain = config.pretrain and _scale_schedule(config.pretrain, scale)
    small.variants = {n: _variant(v, folder, scale) for n, v in config.variants.items()}
    small.checkpoint.every = max(1, small.train.steps // 2)
    small.validation.every = small.train.steps // 2 if config.validation.every else 0
    report = section(small, Report)
    report.seeds, report.settings, report.max_controls = [], [], 0
    return small


def shrink(small: Config, parallel: Parallel, *, tokenizer: str | None) -> None:
    """Changes a recipe cut short into one of a small model, in small blocks, batches and layout.

    Args:
        small: the recipe; changed in place.
        parallel: the layout.
        tokenizer: takes the place of the recipe's; None if that one can be had.
    """
    domain, tasks = small.domain, section(small, Tasks)
    if small.model.hf is not None:
        small.model.hf, small.model.shape = f"{small.run_dir}/{CHECKPOINT}", None
    if tokenizer is not None:
        domain.tokenizer, domain.eod, small.model.special_tokens = tokenizer, None, "same"
    if tasks.held_out and not any(spec.document_holdout for spec in domain.specs):
        domain.holdout_floor = max(domain.holdout_floor or 0, _HELD_OUT_QUESTIONS)
    domain.block_size, domain.workers = BLOCK_SIZE, min(domain.workers, 2)
    small.train = _small_batches(small.train, parallel)
    small.pretrain = small.pretrain and _small_batches(small.pretrain, parallel)
    for variant in small.variants.values():
        for part in ("train", "scoring"):
            kept = {k: v for k, v in variant.get(part, {}).items() if not k.endswith("batch_size")}
            variant |= {part: kept} if part in variant else {}
    small.scoring.micro_batch_size = min(small.scoring.micro_batch_size, _SCORING_MICRO_BATCH)
    small.validation.blocks = min(small.validation.blocks, 2)
    # no memory is planned for the small model
    small.cluster.gpu_memory_gib = small.cluster.node_memory_gib = 0.0
    # a run on several nodes is rehearsed on two
    if 0 < small.cluster.gpus_per_node < small.parallel.world_size and parallel.world_size >= 2:
        small.cluster.gpus_per_node = parallel.world_size // 2
    small.parallel = parallel
    tasks.limit = min(tasks.limit or _HELD_OUT_QUESTIONS, _HELD_OUT_QUESTIONS)
    tasks.held_out = min(tasks.held_out, _HELD_OUT_QUESTIONS)
    if tasks.capabilities:
        tasks.include = f"{small.run_dir}/{TASKS}"


def batches_drawn(small: Config) -> float:
    """Returns the most batches that an arm draws, candidates included."""
    return max(
        arm.train.steps * max(2.0, arm.planned_arm.num_candidates / arm.train.batch_size)
        for arm in trained_arms(small)
    )


def cap_sources(small: Config, out_of_reach: Iterable[str] = (), least: float = 0.0) -> None:
    """Takes the first documents of every source, as many as the arms can use, and made ones.

    Nothing is read to its end: neither for `dedup` nor for a cap.

    Args:
        small: the recipe cut short, in its final sizes; changed in place.
        out_of_reach: sources for which made-up text stands in.
        least: batches for which there is to be text, as those of a run that uses this one.
    """
    drawn = max(least, batches_drawn(small)) * small.train.batch_size
    most = int(1.1 * drawn * small.domain.block_size)  # a tenth more for the holdout
    sources = {name: dict(values) for name, values in small.domain.sources.items()}
    for number, spec in enumerate(small.domain.specs):
        cap = min(spec.max_tokens or most, most)
        if spec.name in out_of_reach:
            made = {"kind": "synthetic", "files": [f"markov:{number}"], "max_tokens": cap}
            kept = {"role": spec.role, "document_holdout": spec.document_holdout}
            sources[spec.name] = kept | made
            continue
        if _takes_cap(spec):
            sources[spec.name] |= {"max_tokens": cap, "dedup": False}
    if all("max_tokens" in values for values in sources.values()):  # and not those of the run
        section(small, Plan).adaptation_tokens = section(small, Plan).replay_tokens = None
    small.domain = dataclasses.replace(small.domain, sources=sources)  # parsed anew


def sources_out_of_reach(config: Config, unanswered: Iterable[str]) -> dict[str, str]:
    """Returns why sources cannot be read by a rehearsal with a small model, by name.

    Args:
        config: the recipe.
        unanswered: keys whose repository the hub does not give now.
    """
    reasons: dict[str, str] = {}
    for spec in config.domain.specs:
        if f"domain.sources.{spec.name}.path" in unanswered:
            reasons[spec.name] = "the hub does not answer"
        elif spec.kind == "generated":
            reasons[spec.name] = "a small base has nothing to write"
        elif spec.kind == "megatron" and "domain.tokenizer" in unanswered:
            reasons[spec.name] = "its ids are of a tokenizer that is not here"
        elif not _takes_cap(spec):
            reasons[spec.name] = "a blend of files with weights is read whole"
    return reasons


def _takes_cap(spec: SourceSpec) -> bool:
    try:
        dataclasses.replace(spec, max_tokens=1)
    except ValueError:
        return False
    return True


def _small_batches(train: Optimisation, parallel: Parallel) -> Optimisation:
    # every replica adds up the gradients of two micro-batches or more, and pipelines stay busy
    most = 2 if parallel.data * parallel.pipeline <= 2 else 1
    small = min(train.micro_batch_size, most)
    return dataclasses.replace(train, micro_batch_size=small, batch_size=BATCH_SIZE)


def _variant(variant: Any, folder: Path, scale: float) -> dict[str, Any]:
    small = dict(variant or {})
    small |= _scaled_steps({"steps": small.get("steps")}, scale)
    if small.get("curriculum") is not None:
        run, arm = _run_and_arm(small["curriculum"])
        small["curriculum"] = str(folder_of_other(folder, run) / "arms" / arm)
    if small.get("reference") is not None:
        small["reference"] = str(folder_of_other(folder, small["reference"]))
    if small.get("train"):
        small["train"] = small["train"] | _scaled_steps(small["train"], scale)
    return small


def _scale_schedule(train: Optimisation, scale: float) -> Optimisation:
    return dataclasses.replace(train, **_scaled_steps(dataclasses.asdict(train), scale))


def _scaled_steps(values: dict[str, Any], scale: float) -> dict[str, Any]:
    """Returns the keys of a schedule that count steps, scaled; a warm-up may vanish."""
    least = {"steps": 1, "warmup_steps": 0, "decay_steps": 1}
    return {
        name: max(min(fewest, values[name]), round(values[name] * scale))
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
