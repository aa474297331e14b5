"""The work of a recipe's stages, in blocks: the input of the cost of `nemo-rod plan`."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from nemo_rod.config import Config, section
from nemo_rod.corpus.sources import ROLES, SourceSpec
from nemo_rod.lab.plan.costs import Work
from nemo_rod.lab.plan.memory import BYTES
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Shape
from nemo_rod.run.handover import Stage
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import REFERENCES, ArmSettings, arm_settings, trained_arms

BYTES_PER_TOKEN = 4.0  # bytes of text, for caps in bytes under a tokenizer with a large vocabulary
REFERENCE_BYTES = 44  # per block: sums, hash, checksum
BLOCK_BYTES = 36  # per block besides its tokens: hash and index
CHECKPOINT_BYTES = {"bf16": 14, "fp32": 12}  # per parameter: weights, fp32 weights, two moments


def corpus_blocks(config: Config) -> dict[str, Any]:
    """Returns training and held-out blocks by role: counted, stated by `plan`, or upper bounds."""
    stages = Stages(config)
    if (stages.results.blocks / "manifest.json").is_file():
        from nemo_rod.corpus.store import BlockStore

        train = BlockStore(stages.results.blocks)
        held = BlockStore(stages.results.blocks, split="holdout")
        return {
            "num_adaptation": train.num_adaptation,
            "num_replay": train.num_replay,
            "held_adaptation": held.num_adaptation,
            "held_replay": held.num_replay,
            "source": "counted",
        }
    domain, stated = config.domain, list[bool]()
    found: dict[str, Any] = {}
    for role in ROLES:
        tokens = getattr(section(config, Plan), f"{role}_tokens")
        stated.append(tokens is not None)
        if tokens is None and role == "replay" and domain.replay_ratio is not None:
            blocks = found["num_adaptation"] + found["held_adaptation"]
            tokens = domain.replay_ratio * blocks * domain.block_size
        elif tokens is None:
            tokens = sum(_cap(s, config) for s in domain.specs if s.role == role)
        blocks = int(tokens // domain.block_size)
        found[f"held_{role}"] = round(blocks * domain.holdout_fraction)
        found[f"num_{role}"] = blocks - found[f"held_{role}"]
    return {**found, "source": "stated by plan" if all(stated) else "at most, by the caps"}


def _cap(spec: SourceSpec, config: Config) -> float:
    """Returns the maximum number of tokens of a source."""
    caps = [float(spec.max_tokens)] if spec.max_tokens else []
    caps += [spec.max_bytes / _bytes_per_token(config)] if spec.max_bytes else []
    if not caps:
        raise ValueError(
            f"The plan does not know how large source {spec.name} is: set plan.{spec.role}_tokens "
            "to the tokens of that role, or max_tokens of the source."
        )
    return min(caps)


def stage_works(config: Config, shape: Shape, blocks: dict[str, Any]) -> list[Work]:
    """Returns the work of every stage of a recipe, evaluation included, on `corpus_blocks`."""
    stages = Stages(config)
    trained = trained_stages(config)
    works = [
        _work(stage, stages, shape, blocks, trained.get(stage.name)) for stage in stages.models()
    ]
    models = 1 + sum(name != "base" for name in config.arms)
    held = blocks["held_adaptation"] + blocks["held_replay"]
    return [*works, Work(name="evaluate", read=held * models)]


def trained_stages(config: Config) -> dict[str, ArmSettings]:
    """Returns the settings of every stage that trains, by its name."""
    arms = [] if config.model.hf else [arm_settings(config, "base")]
    return {arm.name: arm for arm in [*arms, *trained_arms(config)]}


def _work(
    stage: Stage,
    stages: Stages,
    shape: Shape,
    blocks: dict[str, Any],
    settings: ArmSettings | None,
) -> Work:
    config, name, command = stages.config, stage.name, stage.command.split()[0]
    size = config.domain.block_size
    weights = shape.parameters * BYTES[config.model.precision]
    if command == "prepare":
        count = sum(blocks[f"{split}_{role}"] for split in ("num", "held") for role in ROLES)
        seconds = _preparing(config, blocks)
        return Work(name=name, cpu_seconds=seconds, disk=count * (4 * size + BLOCK_BYTES))
    if command == "reference":
        reference = REFERENCES[name.removeprefix("references_")]
        count = blocks[f"num_{reference.role}"]
        return Work(name=name, read=count, disk=count * REFERENCE_BYTES)
    if settings is None:  # a merge, or a base that is there already
        return Work(name=name, disk=weights)
    optimisation = settings.train
    arm = stages.jobs.arm(name, blocks)
    pool = arm.num_candidates if arm.policy().needs_scores else 0
    candidates = pool or optimisation.batch_size
    kept = config.checkpoint.keep * shape.parameters * CHECKPOINT_BYTES[config.model.precision]
    curriculum = optimisation.steps * (20 + 16 * candidates + candidates // 8)
    return Work(
        name=name,
        steps=optimisation.steps,
        batch_size=optimisation.batch_size,
        pool_size=pool,
        eighths=arm.eighths,
        scored_share=arm.scored_share,
        disk=weights + kept + curriculum,
    )


def _preparing(config: Config, blocks: dict[str, Any]) -> float:
    """Returns the seconds of reading or of tokenising text, whichever is slower."""
    tokens = read = 0.0
    for role in ROLES:
        count = (blocks[f"num_{role}"] + blocks[f"held_{role}"]) * config.domain.block_size
        taken = [spec.subsample for spec in config.domain.specs if spec.role == role]
        tokens += count
        # assumes sources of equal size
        read += count * _bytes_per_token(config) * fmean(1 / share for share in taken)
    plan = section(config, Plan)
    return max(tokens / (plan.tokenise_rate * config.domain.workers), read / plan.read_rate)


def _bytes_per_token(config: Config) -> float:
    return 1.0 if config.domain.tokenizer == "byte" else BYTES_PER_TOKEN
