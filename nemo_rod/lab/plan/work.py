"""The work of a recipe's stages, in blocks: the input of the cost of `nemo-rod plan`."""

from __future__ import annotations

from contextlib import suppress
from math import ceil, inf
from statistics import fmean
from typing import Any

import numpy as np

from nemo_rod import parts
from nemo_rod.config import Config, Domain, section
from nemo_rod.corpus.build_source import least_held_out
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.resplit import most_held_out
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.lab.controls import FOLDER
from nemo_rod.lab.merge import merge_stages
from nemo_rod.lab.plan.costs import Work
from nemo_rod.lab.plan.memory import BYTES
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Shape
from nemo_rod.lab.report.section import Report, has_controls
from nemo_rod.roles import ROLES
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import REFERENCES, ArmSettings, arm_settings, trained_arms
from nemo_rod.selection.arm_names import parse_arm

BYTES_PER_TOKEN = 4.0  # bytes of text, for caps in bytes under a tokenizer with a large vocabulary
REFERENCE_BYTES = 12  # per block: hash and loss
BLOCK_BYTES = 36  # per block besides its tokens: hash and index
TOKENISE_RATE = 450_000.0  # tokens made of text per second and core
READ_RATE = 100e6  # bytes of text read per second
CHECKPOINT_BYTES = {"bf16": 14, "fp32": 12}  # per parameter: weights, fp32 weights, two moments


def corpus_blocks(stages: Stages) -> dict[str, Any]:
    """Returns training and held-out blocks by role: counted, stated by `plan`, or upper bounds.

    Raises:
        ValueError: there is no bound on a source.
    """
    config, folder, domain = stages.config, stages.results.blocks, stages.config.domain
    counts: dict[str, Any]
    if (folder / "manifest.json").is_file():
        from nemo_rod.corpus.store import BlockStore

        stores = {"num": BlockStore(folder), "held": BlockStore(folder, split="holdout")}
        rows = [(part, role) for part in stores for role in ROLES]
        counts = {f"{part}_{role}": getattr(stores[part], f"num_{role}") for part, role in rows}
        return {**counts, "source": "counted"}
    stated = {role: getattr(section(config, Plan), f"{role}_tokens") for role in ROLES}
    counts = {}
    for role, tokens in stated.items():
        sizes = [1.0 for spec in domain.specs if spec.role == role]  # alike, unless known
        if tokens is None and role == "replay" and domain.replay_ratio is not None:
            blocks = counts["num_adaptation"] + counts["held_adaptation"]
            tokens = domain.replay_ratio * blocks * domain.block_size
        elif tokens is None:
            sizes = []
            for spec in domain.specs:
                if spec.role != role:
                    continue
                caps = [float(spec.max_tokens)] if spec.max_tokens else []
                caps += [spec.max_bytes / _bytes_per_token(config)] if spec.max_bytes else []
                caps += [spec.subsample * _text_bytes(spec) / _bytes_per_token(config)]
                if min(caps) == inf:
                    raise ValueError(
                        f"The plan does not know how large source {spec.name} is: set plan."
                        f"{role}_tokens to the tokens of that role, or max_tokens of the source."
                    )
                sizes.append(min(caps))
            tokens = sum(sizes)
        blocks = int(tokens // domain.block_size) or int(tokens > 0)  # `prepare` refuses a part
        of_source = [blocks * size / max(sum(sizes), 1e-9) for size in sizes]
        counts[f"held_{role}"] = round(sum(_held_out(domain, size) for size in of_source))
        counts[f"num_{role}"] = blocks - counts[f"held_{role}"]
    are_stated = all(tokens is not None for tokens in stated.values())
    return {**counts, "source": "stated by plan" if are_stated else "at most, by caps and files"}


def trained_stages(config: Config) -> dict[str, ArmSettings]:
    """Returns the settings of every stage that trains, by its name."""
    arms = [] if config.model.hf else [arm_settings(config, "base")]
    return {arm.name: arm for arm in [*arms, *trained_arms(config)]}


def stage_works(stages: Stages, shape: Shape, blocks: dict[str, Any]) -> list[Work]:
    """Returns the work of every stage of a recipe, evaluation included, on `corpus_blocks`."""
    config = stages.config
    trained, works = trained_stages(config), list[Work]()
    weights = shape.parameters * BYTES[config.model.precision]
    checkpoint = shape.parameters * CHECKPOINT_BYTES[config.model.precision]
    held = blocks["held_adaptation"] + blocks["held_replay"]
    by_role = np.split(stages.jobs.reference_mask(blocks), [blocks["num_adaptation"]])
    for stage in [*stages.models(), *merge_stages(stages)]:
        name, command = stage.name, stage.command.split()[0]
        if command == "prepare":
            count = blocks["num_adaptation"] + blocks["num_replay"] + held
            tokens, read, disk = count * config.domain.block_size, 0.0, 0.0
            for role in ROLES:
                in_role = blocks[f"num_{role}"] + blocks[f"held_{role}"]
                specs = [spec for spec in config.domain.specs if spec.role == role]
                if specs:  # assumes sources of equal size
                    read += in_role * fmean(1 / spec.subsample for spec in specs)
                    copied = fmean(bool(spec.options.get("copy", True)) for spec in specs)
                    disk += in_role * (4 * config.domain.block_size * copied + BLOCK_BYTES)
            read *= config.domain.block_size * _bytes_per_token(config)
            tokenising = tokens / (TOKENISE_RATE * config.domain.workers)
            seconds = max(tokenising, read / READ_RATE)
            works.append(Work(name=name, cpu_seconds=seconds, disk=disk))
        elif command == "reference":
            is_replay = REFERENCES[name.removeprefix("references_")].role == "replay"
            count = int(by_role[is_replay].sum())
            works.append(Work(name=name, read=count, disk=count * REFERENCE_BYTES))
        elif name not in trained:  # a merge, or an existing base
            works.append(Work(name=name, disk=weights))
        else:
            train, arm = trained[name].train, stages.jobs.arm(name, blocks)
            pool = arm.num_candidates if "losses" in arm.needs else 0
            candidates = pool or train.batch_size
            # another model reads the replay, too; at most, where the share is not fixed
            passes = sum(parts.load("terms", term).passes for term in train.terms)
            share = parse_arm(trained[name].of).value / 100 or 1.0
            curriculum = train.steps * (20 + 16 * candidates + candidates // 8)
            steps = train.steps - (trained[name].variant.at or 0)  # a branch's own
            works.append(
                Work(
                    name=name,
                    steps=steps,
                    batch_size=train.batch_size,
                    read=round(passes * share * steps * train.batch_size),
                    pool_size=pool,
                    prefix=arm.scored_prefix,
                    saved=ceil(steps / config.checkpoint.every) * checkpoint,
                    disk=weights + config.checkpoint.keep * checkpoint + curriculum,
                )
            )
    if has_controls(config):  # an upper bound
        most, train = section(config, Report).max_controls, config.train
        works.append(
            Work(
                name=FOLDER,
                steps=most * train.steps,
                batch_size=train.batch_size,
                saved=most * ceil(train.steps / config.checkpoint.every) * checkpoint,
                disk=most * (weights + config.checkpoint.keep * checkpoint),
            )
        )
    models = 1 + sum(name != "base" for name in config.arms)
    return [*works, Work(name="evaluate", read=held * models)]


def _held_out(domain: Domain, blocks: float) -> float:
    """Returns how many of a source's blocks are held out; see `corpus.resplit`."""
    floor = least_held_out(domain.holdout_fraction, domain.holdout_floor)
    return max(blocks * domain.holdout_fraction, min(floor, most_held_out(blocks)))


def _text_bytes(spec: SourceSpec) -> float:
    """Returns the size of a source's local files of plain text, if it has no others."""
    if spec.kind not in ("text", "jsonl") or any("://" in str(file) for file in spec.files):
        return inf
    with suppress(ValueError, OSError, ImportError):
        inputs = open_inputs(spec)
        if not any(item.name.endswith((".gz", ".bz2", ".xz", ".zst")) for item in inputs):
            return float(sum(item.size or inf for item in inputs))
    return inf


def _bytes_per_token(config: Config) -> float:
    return 1.0 if config.domain.tokenizer == "byte" else BYTES_PER_TOKEN
