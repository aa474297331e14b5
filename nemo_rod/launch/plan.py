"""`nemo-rod plan`: what a recipe will cost, from its configuration alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rod.config import Config
from nemo_rod.corpus.documents import ROLES, SourceSpec
from nemo_rod.corpus.shards import write_json
from nemo_rod.launch.handover import Stage
from nemo_rod.launch.prepare import source_specs
from nemo_rod.launch.stages import SPECIALIST, Stages
from nemo_rod.plan.costs import PlanResult, Saving, Setup, Work, cost, prefix_saving
from nemo_rod.plan.flops import forward_flops
from nemo_rod.plan.memory import GIB, Load, Memory, check_layout, memory_per_gpu
from nemo_rod.plan.shapes import Shape, read_shape
from nemo_rod.plan.speed import Speed, processor
from nemo_rod.plan.table import format_plan
from nemo_rod.selection.arms import arm_kind

BYTES_PER_TOKEN = 4.0  # of text, for caps in bytes under a tokenizer with a large vocabulary
REFERENCE_BYTES = 44  # of a block: sums, hash, checksum
BLOCK_BYTES = 36  # of a block beside its tokens: hash and index
CHECKPOINT_BYTES = {"bf16": 14, "fp32": 12}  # of a parameter: weights, fp32 weights, two moments


def plan(config: Config) -> None:
    """Prints the plan and writes it to `plan.json` in the run folder.

    Raises:
        ValueError: if the layout cannot run or does not fit, after the plan was shown.
    """
    result = make_plan(config)
    write_json(Path(config.run_dir) / "plan.json", result.as_dict())
    print(format_plan(result))
    refuse_what_does_not_fit(result)


def make_plan(config: Config) -> PlanResult:
    """Plans a recipe; nothing is read but its configuration, and blocks that are there.

    Raises:
        ValueError: if the layout cannot run, or something that the plan needs is not known.
    """
    shape = model_shape(config)
    parallel, size = config.parallel, config.domain.block_size
    check_layout(shape, parallel, block_size=size, gpus_per_node=config.cluster.gpus_per_node)
    profile, peak, reached, backward = processor(config, has_experts=shape.has_experts)
    per_token = forward_flops(shape, size)
    speed = Speed(
        forward_flops=per_token,
        processes=parallel.world_size,
        flops_per_second=peak * 1e12 * reached,
        backward=backward,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
    )
    setup = Setup(
        speed=speed,
        parallel=parallel,
        block_size=size,
        micro_batch_size=config.train.micro_batch_size,
        scoring_micro_batch_size=config.scoring.micro_batch_size,
    )
    blocks = corpus_blocks(config)
    works = _works(config, shape, blocks)
    return PlanResult(
        recipe=config.recipe,
        model={
            "name": config.model.hf or config.model.architecture["model_type"],  # type: ignore[index]
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "forward_flops": per_token,
            "precision": config.model.precision,
        },
        corpus={
            "adaptation_tokens": (blocks["num_adaptation"] + blocks["held_adaptation"]) * size,
            "replay_tokens": (blocks["num_replay"] + blocks["held_replay"]) * size,
            "source": blocks["source"],
        },
        layout=_layout(config),
        assumptions={
            "processor": profile.name,
            "peak_tflops": peak,
            "utilisation": reached,
            "backward": backward,
            "source": profile.source,
            **{key: getattr(config.plan, key) for key in _ASSUMED},
        },
        memory=_memory(config, shape),
        stages=[cost(work, setup) for work in works],
        savings=_savings(works, setup, shape),
        notes=_notes(config, works, setup, blocks),
    )


_ASSUMED = ("expert_imbalance", "memory_reserve", "tokenise_rate", "read_rate")


def refuse_what_does_not_fit(result: PlanResult) -> None:
    """Refuses a layout that needs more memory than its GPUs have.

    Raises:
        ValueError: what it needs, part by part, and what to change.
    """
    memory = result.memory
    if memory.fits:
        return
    assert memory.limit is not None
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    raise ValueError(
        f"The layout does not fit: a GPU of stage {memory.stage} would need {memory}, and has "
        f"{memory.limit / GIB:.0f} GiB. Most are {largest}: {_CURES[largest]}."
    )


_CURES = {
    "weights": "raise parallel.tensor, parallel.pipeline or, with experts, parallel.expert",
    "gradients": "raise parallel.tensor, parallel.pipeline or, with experts, parallel.expert",
    "optimizer": "raise parallel.data, whose replicas share its state",
    "activations": "lower train.micro_batch_size, or raise parallel.tensor with sequence=true",
    "logits": "lower train.micro_batch_size, or raise parallel.tensor",
    "scoring": "lower scoring.micro_batch_size",
    "reserve": "lower plan.memory_reserve",
}


def model_shape(config: Config) -> Shape:
    """The model's shape: of the base that is trained here, a local checkpoint, or the recipe.

    Raises:
        ValueError: if none of them is there, naming the key to set.
    """
    model = config.model
    if model.architecture is not None:
        return read_shape(model.architecture)
    assert model.hf is not None
    local = Path(model.hf) / "config.json"
    if local.is_file():
        return read_shape(json.loads(local.read_text()))
    if model.shape is not None:
        return read_shape(model.shape)
    raise ValueError(
        f"The plan does not know the shape of {model.hf}: set model.shape to the content of its "
        "config.json, or model.hf to a folder that holds it."
    )


def corpus_blocks(config: Config) -> dict[str, Any]:
    """Training and held-out blocks of each role: counted, stated by the recipe, or at most.

    Raises:
        ValueError: if a role's size is not known.
    """
    stages = Stages(config)
    if (stages.blocks / "manifest.json").is_file():
        from nemo_rod.corpus.store import BlockStore

        train, held = BlockStore(stages.blocks), BlockStore(stages.blocks, split="holdout")
        return {
            "num_adaptation": train.num_adaptation,
            "num_replay": train.num_replay,
            "held_adaptation": held.num_adaptation,
            "held_replay": held.num_replay,
            "source": "counted",
        }
    domain, found, stated = config.domain, {}, []
    for role in ROLES:
        tokens = getattr(config.plan, f"{role}_tokens")
        stated.append(tokens is not None)
        if tokens is None:
            tokens = sum(_cap(s, config) for s in source_specs(domain) if s.role == role)
        blocks = int(tokens // domain.block_size)
        found[f"held_{role}"] = round(blocks * domain.holdout_fraction)
        found[f"num_{role}"] = blocks - found[f"held_{role}"]
    return {**found, "source": "stated by plan" if all(stated) else "at most, by the caps"}


def _cap(spec: SourceSpec, config: Config) -> float:
    """Tokens that a source can have at most."""
    caps = [float(spec.max_tokens)] if spec.max_tokens else []
    caps += [spec.max_bytes / _bytes_per_token(config)] if spec.max_bytes else []
    if not caps:
        raise ValueError(
            f"The plan does not know how large source {spec.name} is: set plan.{spec.role}_tokens "
            "to the tokens of that role, or max_tokens of the source."
        )
    return min(caps)


def _works(config: Config, shape: Shape, blocks: dict[str, Any]) -> list[Work]:
    stages = Stages(config)
    works = [_work(stage, stages, shape, blocks) for stage in stages.all()]
    models = 1 + sum(arm_kind(name) != "base" for name in config.arms)
    held = blocks["held_adaptation"] + blocks["held_replay"]
    return [*works, Work(name="evaluate", read=held * models)]


def _work(stage: Stage, stages: Stages, shape: Shape, blocks: dict[str, Any]) -> Work:
    config, name = stages.config, stage.name
    size = config.domain.block_size
    weights = shape.parameters * {"bf16": 2, "fp32": 4}[config.model.precision]
    if stage.command == "prepare":
        count = sum(blocks[f"{split}_{role}"] for split in ("num", "held") for role in ROLES)
        seconds = _preparing(config, blocks)
        return Work(name=name, cpu_seconds=seconds, disk=count * (4 * size + BLOCK_BYTES))
    if stage.command == "score":
        role = "replay" if name == "references_base" else "adaptation"
        return Work(
            name=name, read=blocks[f"num_{role}"], disk=blocks[f"num_{role}"] * REFERENCE_BYTES
        )
    if stage.command == "merge" or (stage.command == "pretrain" and config.model.hf):
        return Work(name=name, disk=weights)
    base = stage.command == "pretrain"
    optimisation = config.pretrain if base else stages.schedule(name)
    assert optimisation is not None
    arm = stages.arm(name, optimisation, blocks)
    pool = arm.pools().size if arm.policy().needs_scores else 0
    candidates = pool or optimisation.batch_size
    kept = config.checkpoint.keep * shape.parameters * CHECKPOINT_BYTES[config.model.precision]
    curriculum = optimisation.steps * (20 + 16 * candidates + candidates // 8)
    return Work(
        name=name,
        steps=optimisation.steps,
        batch_size=optimisation.batch_size,
        pool_size=pool,
        disk=weights + kept + curriculum,
    )


def _preparing(config: Config, blocks: dict[str, Any]) -> float:
    """Seconds of the slower of reading text and making tokens of it."""
    tokens = read = 0.0
    for role in ROLES:
        count = (blocks[f"num_{role}"] + blocks[f"held_{role}"]) * config.domain.block_size
        taken = [spec.subsample for spec in source_specs(config.domain) if spec.role == role]
        tokens += count
        read += count * _bytes_per_token(config) * len(taken) / sum(taken)
    plan = config.plan
    return max(tokens / (plan.tokenise_rate * config.domain.workers), read / plan.read_rate)


def _bytes_per_token(config: Config) -> float:
    return 1.0 if config.domain.tokenizer == "byte" else BYTES_PER_TOKEN


def _layout(config: Config) -> dict[str, Any]:
    parallel, cluster = config.parallel, config.cluster
    shown = {
        "data": parallel.data,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "virtual_pipeline": parallel.virtual_pipeline,
        "context": parallel.context,
        "expert": parallel.expert,
    }
    split = " x ".join(f"{k} {v}" for k, v in shown.items() if v > 1 and k != "expert") or "single"
    experts = f", experts over {parallel.expert}" if parallel.expert > 1 else ""
    world = parallel.world_size
    nodes = -(-world // cluster.gpus_per_node) if cluster.gpus_per_node else 1
    where = (
        f"{world} {cluster.gpu} on {nodes} node{'s' if nodes > 1 else ''}"
        if cluster.gpu
        else f"{world} process{'es' if world > 1 else ''} without GPU"
    )
    batches = (
        f"micro-batch {config.train.micro_batch_size}, scoring {config.scoring.micro_batch_size}"
    )
    return {
        **dataclasses.asdict(parallel),
        "gpu": cluster.gpu,
        "processes": world,
        "nodes": nodes,
        "micro_batch_size": config.train.micro_batch_size,
        "scoring_micro_batch_size": config.scoring.micro_batch_size,
        "text": f"{where}: {split}{experts}; {batches}",
    }


def _memory(config: Config, shape: Shape) -> Memory:
    parallel, cluster, train = config.parallel, config.cluster, config.train
    split = parallel.distributed_optimizer
    load = Load(
        precision=config.model.precision,
        block_size=config.domain.block_size,
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=train.batch_size // (train.micro_batch_size * parallel.data),
        scoring_micro_batch_size=config.scoring.micro_batch_size,
        split_optimizer=bool(cluster.gpu) if split is None else split,
        expert_imbalance=config.plan.expert_imbalance,
        reserve=config.plan.memory_reserve,
    )
    limit = cluster.gpu_memory_gib * GIB if cluster.gpu else None
    return memory_per_gpu(shape, parallel, load, limit)


def _savings(works: Sequence[Work], setup: Setup, shape: Shape) -> list[Saving]:
    selecting = [work for work in works if work.pool_size]
    if not selecting:
        return []
    hours = {work.name: cost(work, setup).gpu_hours for work in works}
    references = hours["references_base"] + hours["references_specialist"]
    scoring = sum(work.steps * setup.scoring_seconds(work.pool_size) for work in selecting) / 3600
    return [
        *(prefix_saving(selecting, setup, shape, share) for share in (0.5, 0.25)),
        Saving(
            what="replay the curriculum that a smaller model recorded: nothing is scored here",
            gpu_hours=scoring * setup.speed.processes + references,
        ),
        Saving(
            what="take a smaller model's specialist as reference, less what that costs; "
            f"here it is also the arm {SPECIALIST}",
            gpu_hours=hours[SPECIALIST] + hours["references_specialist"],
        ),
    ]


def _notes(
    config: Config, works: Sequence[Work], setup: Setup, blocks: dict[str, Any]
) -> list[str]:
    notes = []
    for pool in sorted({work.pool_size for work in works if work.pool_size}):
        padded, _ = setup.padded(pool)
        if padded > pool:
            notes.append(
                f"scoring.micro_batch_size={setup.scoring_micro_batch_size} on "
                f"{setup.parallel.data} replicas fills each pool of {pool} blocks up to "
                f"{padded:.0f}; a divisor of {pool // setup.parallel.data} does not."
            )
    if not any(work.pool_size for work in works):
        optimisation = config.train
        pool = round(config.selection.multiplier * optimisation.batch_size)
        corpus = blocks["num_adaptation"] + blocks["num_replay"]
        seconds = optimisation.steps * setup.scoring_seconds(pool) + setup.scoring_seconds(corpus)
        notes.append(
            f"no arm selects here; an arm that did would cost "
            f"{seconds / 3600 * setup.speed.processes:,.1f} process-hours more, for scoring and "
            "reference losses."
        )
    return notes
