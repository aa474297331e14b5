"""`nemo-rod plan`: the cost of a recipe, from its configuration alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rod.config import Config, section
from nemo_rod.files import interpreting, read_json, read_lines, write_json
from nemo_rod.lab.plan.costs import PlanResult, Saving, Setup, StageCost, Work, cost, prefix_saving
from nemo_rod.lab.plan.memory import GIB, Load, Memory, check_layout, check_memory, memory_per_gpu
from nemo_rod.lab.plan.plan_text import format_plan
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Shape, forward_flops, read_shape, recomputed_share
from nemo_rod.lab.plan.speed import processor
from nemo_rod.lab.plan.work import corpus_blocks, stage_works, trained_stages
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, ArmSettings
from nemo_rod.trust import is_commit, name_and_revision

_ASSUMED = ("offload_rate", "expert_imbalance", "memory_reserve", "tokenise_rate", "read_rate")


def plan(config: Config) -> None:
    """Prints the plan and, without `dry_run`, writes it to `plan.json` in the run folder.

    Raises:
        ValueError: if the layout cannot run, or does not fit; the latter after printing.
    """
    result = make_plan(config)
    if not config.dry_run:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "plan.json", result.as_dict())
    print(format_plan(result))
    check_memory(config, result.memory)


def check_before_submitting(config: Config) -> None:
    """Refuses a layout that cannot run on its cluster, if the model's shape is known.

    Raises:
        ValueError: if the layout cannot run or does not fit.
    """
    shape = None
    if config.cluster.gpu is not None:
        with suppress(ValueError):
            shape = model_shape(config)
    if shape is not None:
        for memory in _memories(config, shape).values():
            check_memory(config, memory)


def make_plan(config: Config) -> PlanResult:
    """Plans a recipe from its configuration, and from its block store if there is one.

    Raises:
        ValueError: if the layout cannot run, or the model, its processor or a corpus is not known.
    """
    shape, parallel, size = model_shape(config), config.parallel, config.domain.block_size
    memories, assumed = _memories(config, shape), section(config, Plan)
    profile = processor(config, has_experts=shape.has_experts)
    blocks, trained = corpus_blocks(config), trained_stages(config)
    planned = []
    for work in stage_works(config, shape, blocks):
        settings: ArmSettings | Config = trained.get(work.name, config)
        memory = memories.get(work.name)
        setup = Setup(
            forward_flops=forward_flops(shape, size),
            flops_per_second=profile.peak_tflops * 1e12 * profile.utilisation,
            backward=profile.backward,
            recomputed=recomputed_share(shape, size, settings.train.recompute),
            parallel=parallel,
            block_size=size,
            micro_batch_size=settings.train.micro_batch_size,
            scoring_micro_batch_size=settings.scoring.micro_batch_size,
            host_seconds=memory.host / assumed.offload_rate if memory else 0.0,
        )
        planned.append((work, setup))
    costs = [cost(work, setup, shape) for work, setup in planned]
    return PlanResult(
        recipe=config.recipe,
        model={
            "name": config.model.hf or (config.model.architecture or {})["model_type"],
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "forward_flops": forward_flops(shape, size),
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
            "peak_tflops": profile.peak_tflops,
            "utilisation": profile.utilisation,
            "backward": profile.backward,
            "source": profile.source,
            **{key: getattr(assumed, key) for key in _ASSUMED},
        },
        memory=max(memories.values(), key=lambda memory: memory.total),
        stages=costs,
        savings=_savings(planned, costs, shape),
        notes=[
            *_notes(config, planned, blocks),
            *_measured(config, costs, profile.utilisation),
        ],
    )


def model_shape(config: Config) -> Shape:
    """Returns the model's shape: of the base trained here, a local checkpoint, or the recipe."""
    model = config.model
    if model.architecture is not None:
        return read_shape(model.architecture)
    assert model.hf is not None
    local = Path(model.hf) / "config.json"
    if local.is_file():
        return read_shape(read_json(local))
    if model.shape is not None:
        return read_shape(model.shape)
    raise ValueError(
        f"The plan does not know the shape of {model.hf}: set model.shape to the content of its "
        "config.json, or model.hf to a folder that holds it."
    )


def _layout(config: Config) -> dict[str, Any]:
    parallel, cluster = config.parallel, config.cluster
    axes = ("data", "tensor", "pipeline", "virtual_pipeline", "context")
    sizes = {axis: getattr(parallel, axis) for axis in axes}
    split = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "single"
    experts = f", experts over {parallel.expert}" if parallel.expert > 1 else ""
    world = parallel.world_size
    nodes = -(-world // cluster.gpus_per_node) if cluster.gpus_per_node else 1
    where = (
        f"{world} {cluster.gpu} on {nodes} node{'s' if nodes > 1 else ''}"
        if cluster.gpu
        else f"{world} process{'es' if world > 1 else ''} without GPU"
    )
    trained, scored = config.train.micro_batch_size, config.scoring.micro_batch_size
    return {
        **dataclasses.asdict(parallel),
        "gpu": cluster.gpu,
        "processes": world,
        "nodes": nodes,
        "micro_batch_size": trained,
        "scoring_micro_batch_size": scored,
        "text": f"{where}: {split}{experts}; micro-batch {trained}, scoring {scored}",
    }


def _memories(config: Config, shape: Shape) -> dict[str, Memory]:
    """Returns the memory of the fullest GPU by stage that trains; by recipe if none does.

    Raises:
        ValueError: if the layout cannot run.
    """
    parallel, cluster, assumed = config.parallel, config.cluster, section(config, Plan)
    size, gpus = config.domain.block_size, cluster.gpus_per_node
    check_layout(shape, parallel, block_size=size, gpus_per_node=gpus)
    split, memories = parallel.distributed_optimizer, {}
    trained: Mapping[str, ArmSettings | Config] = trained_stages(config) or {config.recipe: config}
    for name, settings in trained.items():
        train = settings.train
        load = Load(
            precision=config.model.precision,
            block_size=size,
            micro_batch_size=train.micro_batch_size,
            num_micro_batches=train.batch_size // (train.micro_batch_size * parallel.data),
            scoring_micro_batch_size=settings.scoring.micro_batch_size,
            split_optimizer=bool(cluster.gpu) if split is None else split,
            expert_imbalance=assumed.expert_imbalance,
            reserve=assumed.memory_reserve,
            recompute=train.recompute,
            grad_reduce=train.grad_reduce,
            precision_aware=train.precision_aware_optimizer,
            offload=train.optimizer_offload,
        )
        limit = cluster.gpu_memory_gib * GIB or None
        memories[name] = memory_per_gpu(shape, parallel, load, limit)
    return memories


def _savings(
    planned: Sequence[tuple[Work, Setup]], costs: Sequence[StageCost], shape: Shape
) -> list[Saving]:
    selecting = [(work, setup) for work, setup in planned if work.pool_size]
    if not selecting:
        return []
    hours = {stage.name: stage.gpu_hours for stage in costs}
    references = sum(hours[name] for name in hours if name.startswith("references_"))
    steps = {work.name: work.steps for work, _ in selecting}
    scoring = sum(stage.scoring_seconds * steps.get(stage.name, 0) for stage in costs)
    least = min(work.scored_part for work, _ in selecting)
    processes = selecting[0][1].parallel.world_size
    savings = [
        *(prefix_saving(selecting, shape, n) for n in (2, 4) if 1 / n < least),
        Saving(
            what="replay the curriculum that a smaller model recorded: nothing is scored here",
            gpu_hours=scoring / 3600 * processes + references,
        ),
    ]
    own = (SPECIALIST, "references_specialist")
    if hours.keys() >= {*own}:  # arms may have other references alone
        savings.append(
            Saving(
                what="take a smaller model's specialist as reference, less the cost of that; "
                f"here it is also the arm {SPECIALIST}",
                gpu_hours=sum(hours[name] for name in own),
            )
        )
    return savings


def _notes(
    config: Config, planned: Sequence[tuple[Work, Setup]], blocks: dict[str, Any]
) -> list[str]:
    notes, replicas = [], config.parallel.data
    pools = {
        (work.pool_size, setup.scoring_micro_batch_size, setup.padded(work.pool_size)[0])
        for work, setup in planned
        if work.pool_size
    }
    for pool, size, padded in sorted(pools):
        if padded > pool:
            notes.append(
                f"scoring.micro_batch_size={size} on {replicas} replicas fills each pool of {pool} "
                f"blocks up to {padded:.0f}; a divisor of {pool // replicas} does not."
            )
    if config.domain.replay_ratio is not None and blocks["source"] != "counted":
        notes.append(
            f"domain.replay_ratio={config.domain.replay_ratio:g} thins replay after prepare has "
            "tokenised all of it: that takes more time than planned, and more disk until then."
        )
    if section(config, Tasks).capabilities:
        notes.append("evaluate is planned without the questions of tasks.")
    if config.scoring.precision is not None:
        notes.append(
            f"scoring.precision={config.scoring.precision} is planned at the speed of "
            "model.precision: its saving has not been measured."
        )
    if keys := _unpinned(config):
        notes.append(
            f"no commit is given by {', '.join(keys)}: the hub's latest is taken and recorded; "
            "revision pins a dataset, and NAME@COMMIT a model or tokenizer."
        )
    if not any(work.pool_size for work, _ in planned):
        setup = planned[-1][1]  # that of the recipe
        pool = Stages(config).jobs.arm("rod", blocks).num_candidates
        corpus = blocks["num_adaptation"] + blocks["num_replay"]
        seconds = config.train.steps * setup.scoring_seconds(pool) + setup.scoring_seconds(corpus)
        unit = "process" if config.cluster.gpu is None else "GPU"
        hours = seconds / 3600 * config.parallel.world_size
        notes.append(
            f"no arm selects here; an arm that did would cost {hours:,.1f} {unit}-hours more, for "
            "scoring and reference losses."
        )
    return notes


def _measured(config: Config, costs: Sequence[StageCost], utilisation: float) -> list[str]:
    """Returns notes that compare the measured time of finished steps with the plan."""
    notes = []
    for planned in costs:
        metrics = Stages(config).results.arm(planned.name) / "metrics.jsonl"
        if not planned.update_seconds or not metrics.is_file():
            continue
        rows = read_lines(metrics, "timing/train/update")
        if not rows:
            continue
        with interpreting(metrics):
            update = median(row["timing/train/update"] for row in rows)
            if update <= 0:
                raise ValueError(f"steps of {update} s")
        notes.append(
            f"{planned.name} took {update:.3g} s a step, scoring aside; planned are "
            f"{planned.update_seconds:.3g}. plan.utilisation="
            f"{utilisation * planned.update_seconds / update:.2g} would plan that."
        )
    return notes


def _unpinned(config: Config) -> list[str]:
    """Returns the keys that name a repository of the hub without its commit."""
    names = {"model.hf": config.model.hf, "domain.tokenizer": config.domain.tokenizer}
    keys = [
        key
        for key, name in names.items()
        if name not in (None, "byte") and not _is_pinned(str(name), name_and_revision(str(name))[1])
    ]
    return keys + [
        f"domain.sources.{spec.name}"
        for spec in config.domain.specs
        if spec.path is not None and not _is_pinned(spec.path, spec.revision)
    ]


def _is_pinned(name: str, revision: str | None) -> bool:
    return is_commit(revision) or name.startswith(("/", ".", "~")) or Path(name).exists()
