"""`nemo-rod plan`: the cost of a recipe, from its configuration alone."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from nemo_rod.commands.run_stages import shows_dry_run
from nemo_rod.commands.text import table
from nemo_rod.config import Config, Optimisation, Parallel, section
from nemo_rod.corpus.adapters.hub_files import is_commit
from nemo_rod.files import each_line, interpreting, read_json, write_json
from nemo_rod.installation import config_folder
from nemo_rod.lab.controls import FOLDER, WHY
from nemo_rod.lab.ignored_keys import ignored_keys, sentence
from nemo_rod.lab.metrics import metrics_of
from nemo_rod.lab.plan.built_shapes import read_shape
from nemo_rod.lab.plan.costs import PlanResult, Setup, StageCost, Work, cost
from nemo_rod.lab.plan.memory import MEASURED, Memory, check_layout, check_memory, memory_per_gpu
from nemo_rod.lab.plan.plan_text import format_plan, wall
from nemo_rod.lab.plan.plan_text import hours as format_hours
from nemo_rod.lab.plan.plan_text import size as format_size
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Shape, forward_flops
from nemo_rod.lab.plan.speed import processor
from nemo_rod.lab.plan.work import corpus_blocks, stage_works, trained_stages
from nemo_rod.lab.report.section import Report, has_controls
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run import hub
from nemo_rod.run.beforehand import lacking
from nemo_rod.run.handover import Stage
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import SPECIALIST, ArmSettings, trained_arms

_SPREAD = 0.02  # nats: standard deviation, over blocks of 1,024 tokens, of what two arms differ by
_OFFLOAD_RATE = 20e9  # bytes of the optimizer's state that a host updates per second, for each GPU


@shows_dry_run
def plan(config: Config) -> None:
    """Prints the plan and, without `dry_run`, writes it to `plan.json` in the run folder.

    Raises:
        ValueError: the layout cannot run; or a run would be refused on any machine, after printing.
    """
    lacks = lacking([stage for stage in Stages(config).all() if not stage.is_there()], config)
    refused = [lack.sentence for lack in lacks if lack.everywhere]
    try:
        result = make_plan(config)
    except ValueError as error:
        raise ValueError(" ".join(refused) or str(error)) from None  # may follow from the former
    if not config.dry_run:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_json(run_dir / "plan.json", result.as_dict())
    here = [f"a run is refused here: {x.sentence}" for x in lacks if not x.everywhere]
    result = dataclasses.replace(result, notes=[*result.notes, *here])
    print(format_plan(result))
    if config.model.hf is not None and (keys := ignored_keys(config.model.hf)):
        print(f"\n  Warning: {sentence(keys, config.model.hf)}.")
    if config.cluster.gpu and (others := shipped_layouts(config)):
        rows = [
            (
                f"parallel={name}",
                f"{other.layout['processes']} {config.cluster.gpu}",
                wall(other.total("hours")),
                f"{format_hours(other.gpu_hours)} GPU-hours",
            )
            for name, other in others
        ]
        print("\n  Layouts of this model that fit:")
        print(indent(table(("", ">", ">", ">"), rows), "    "))
        if not result.memory.fits:
            refused.append(f"parallel={others[0][0]} fits.")
    if refused:
        raise ValueError(" ".join(refused))


def check_stages(config: Config, stages: Sequence[Stage]) -> str:
    """Refuses stages whose layout cannot run on its cluster, if the model's shape is known.

    Returns:
        The size of their submission in a line; "" where it cannot be planned.

    Raises:
        ValueError: the layout cannot run or does not fit.
    """
    shape = None
    if config.cluster.gpu is not None:
        with suppress(ValueError):
            shape = model_shape(config)
    if shape is None:
        return ""
    for memory in _memories(config, shape).values():
        check_memory(config, memory)
    try:
        result = make_plan(config)
    except ValueError:
        return ""
    planned = {stage.name: stage for stage in result.stages}
    left = [planned[stage.name] for stage in stages if stage.name in planned]
    gpu_hours = sum(stage.gpu_hours for stage in left)
    hours = {stage.name: stage.hours for stage in left}
    chains: dict[str, tuple[float, list[str]]] = {}  # stage -> hours to its end, the way there
    for stage in stages:
        before = max((chains[need] for need in stage.needs if need in chains), default=(0.0, []))
        chains[stage.name] = (before[0] + hours.get(stage.name, 0.0), [*before[1], stage.name])
    longest, way = max(chains.values(), default=(0.0, []))
    nodes, cluster = result.layout["nodes"], config.cluster
    return (
        f"{nodes} node{'s' if nodes > 1 else ''} of {cluster.gpus_per_node} {cluster.gpu} for a "
        f"job; {format_hours(gpu_hours)} GPU-hours in all; the longest chain takes {wall(longest)} "
        f"without queues: {' -> '.join(way)}; {cluster.image or 'no image'}"
    )


def check_disk(config: Config, stages: Sequence[Stage]) -> str:
    """Refuses stages that would fill the disk of their run, as far as they can be planned.

    Raises:
        OSError: they would; the message has the room that there is.
    """
    names = {stage.name for stage in stages}
    try:
        needed = sum(stage.disk for stage in make_plan(config).stages if stage.name in names)
    except ValueError:
        return ""
    place = Path(config.run_dir).absolute()
    folder = next(folder for folder in (place, *place.parents) if folder.exists())
    if needed > (free := shutil.disk_usage(folder).free):
        raise OSError(
            f"run_dir={config.run_dir} would need {format_size(needed)}, and "
            f"{format_size(free) or '0 B'} are free there: choose another run_dir, lower "
            "checkpoint.keep, or make room."
        )
    return ""


def make_plan(config: Config) -> PlanResult:
    """Plans a recipe from its configuration, and from its block store if there is one.

    Raises:
        ValueError: the layout cannot run, or the model, its processor or a corpus is not known.
    """
    shape, size = model_shape(config), config.domain.block_size
    memories, assumed = _memories(config, shape), section(config, Plan)
    profile = processor(config, shape)
    stages, trained = Stages(config), trained_stages(config)
    blocks = corpus_blocks(stages)
    planned = []
    for work in stage_works(stages, shape, blocks):
        settings: ArmSettings | Config = trained.get(work.name, config)
        memory = memories.get(work.name)
        setup = Setup(
            shape=shape,
            processor=profile,
            parallel=config.parallel,
            block_size=size,
            micro_batch_size=settings.train.micro_batch_size,
            scoring_micro_batch_size=settings.scoring.micro_batch_size,
            recompute=settings.train.recompute,
            host_seconds=memory.host / _OFFLOAD_RATE if memory else 0.0,
        )
        planned.append((work, setup))
    costs = [cost(work, setup) for work, setup in planned]
    trained_tokens = config.train.steps * config.train.batch_size * size
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
            "epochs": trained_tokens / size / max(1, blocks["num_adaptation"]),
        },
        layout=_layout(config),
        assumptions={
            **dataclasses.asdict(profile),
            **{key: getattr(assumed, key) for key in ("expert_imbalance", "memory_reserve")},
        },
        memory=max(memories.values(), key=lambda memory: memory.total),
        stages=costs,
        notes=[
            *_notes(config, blocks, shape.kind),
            *_notes_on_cost(config, planned, costs),
            *_notes_on_time(stages, planned),
        ],
    )


def shipped_layouts(config: Config) -> list[tuple[str, PlanResult]]:
    """Returns the layouts that are shipped for the recipe's model and fit, the quickest first.

    A model without layouts of its own has the common ones of a GPU and of a whole node. None is
    known of a configuration that was composed elsewhere, such as in a job.
    """
    chosen = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    folder, plans = config_folder() / "parallel", list[tuple[str, PlanResult]]()
    now = folder / f"{chosen.get('parallel')}.yaml"
    layout: Any = OmegaConf.load(now) if now.is_file() else {}
    own = {item.name: item.default for item in dataclasses.fields(Optimisation)}
    without: dict[str, Any] = {key: own[key] for key in layout.get("train", {})}
    train = dataclasses.replace(config.train, **without)
    own_layouts = sorted((folder / str(chosen.get("model"))).glob("*.yaml"))
    for file in own_layouts or sorted(folder.glob("*.yaml") if chosen else ()):
        values: Any = OmegaConf.load(file)
        if not own_layouts:
            values = {"parallel": values, "train": {}, "scoring": {}}
        merged: dict[str, Any] = {
            name: OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(known), values[name]))
            for name, known in (
                ("parallel", Parallel()), ("train", train), ("scoring", config.scoring)
            )
        }  # fmt: skip
        size = merged["parallel"].world_size
        if not own_layouts and size not in (1, config.cluster.gpus_per_node):
            continue
        other = dataclasses.replace(config, **merged)
        with suppress(ValueError):
            result = make_plan(other)
            check_memory(other, result.memory)
            name = file.relative_to(folder).with_suffix("")
            plans.append((str(name), result))
    return sorted(plans, key=lambda item: item[1].total("hours"))


def model_shape(config: Config) -> Shape:
    """Returns the model's shape: of the base trained here, a local checkpoint, or the recipe."""
    model = config.model
    if model.architecture is not None:
        return read_shape(model.architecture)
    assert model.hf is not None
    local = Path(model.hf).expanduser() / "config.json"
    if local.is_file():
        return read_shape(read_json(local))
    if model.shape is not None:
        return read_shape(model.shape)
    try:
        fetched = hub.fetch_file(model.hf, "config.json")
    except Exception as error:  # many kinds, with no class in common
        reason = (str(error) or type(error).__name__).rstrip(".")
        raise ValueError(
            f"The plan does not know the shape of {model.hf}, whose config.json is neither a file "
            f"there nor to be had from the Hugging Face hub ({reason}): set "
            "model.shape to its content, or model.hf to a folder that holds it."
        ) from None
    return read_shape(read_json(fetched))


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
        ValueError: the layout cannot run.
    """
    size, gpus = config.domain.block_size, config.cluster.gpus_per_node
    check_layout(shape, config.parallel, block_size=size, gpus_per_node=gpus)
    trained: Mapping[str, ArmSettings | Config] = trained_stages(config) or {config.recipe: config}
    return {name: memory_per_gpu(shape, config, settings) for name, settings in trained.items()}


def _notes(config: Config, blocks: dict[str, Any], kind: str) -> list[str]:
    """Returns what the plan does not know, and what wastes time, from the configuration alone."""
    notes = list[str]()
    if kind not in MEASURED:
        notes.append(
            f"activations of '{kind}' models are planned like those of other types, and were never "
            "measured; models of Gemma 4 keep more than twice as much."
        )
    if config.domain.replay_ratio is not None and blocks["source"] != "counted":
        notes.append(
            f"domain.replay_ratio={config.domain.replay_ratio:g} thins replay after prepare has "
            "tokenised all of it: that takes more time than planned, and more disk until then."
        )
    for spec in config.domain.specs:
        if spec.kind == "generated":
            notes.append(
                f"domain.sources.{spec.name} is written by a model, which the time of prepare "
                "leaves out: it takes one pass of the model for every token of a batch; `nemo-rod "
                "prepare` shows its pace within a minute, and can be stopped and resumed."
            )
    spread = 1.645 * _SPREAD * (1024 / config.domain.block_size) ** 0.5
    learned, forgot = (
        spread / max(1, blocks[f"held_{role}"]) ** 0.5 for role in ("adaptation", "replay")
    )
    notes.append(
        f"the held-out blocks, {blocks['held_adaptation']:,} new and {blocks['held_replay']:,} of "
        f"replay, show differences of about {learned:.4f} nats in what was learned and "
        f"{forgot:.4f} in what was forgotten (90 %, by the spread of SmolLM2's blocks); with "
        "domain.holdout_fraction or holdout_floor they show smaller ones."
    )
    if section(config, Tasks).capabilities:
        notes.append("evaluate is planned without the questions of tasks.")
    if config.cluster.gpu is None and config.model.precision == "bf16":
        notes.append(
            "no cluster is named, so the plan is a CPU's, at its speed in fp32; bf16 took a toy "
            "twice as long. A run takes the GPUs that torch sees: add cluster=h100_1, or that of "
            "your GPU, to plan for them."
        )
    if config.scoring.precision is not None:
        notes.append(
            f"scoring.precision={config.scoring.precision} is planned at the speed of "
            "model.precision: its saving has not been measured."
        )
    keys = [  # repositories of the hub without a commit
        key.removesuffix(".path")
        for key, repository in hub.repos(config).items()
        if not is_commit(repository.revision)
    ]
    if keys:
        notes.append(
            f"no commit is given by {', '.join(keys)}: the hub's latest is taken and recorded; "
            "revision pins a dataset, and NAME@COMMIT a model or tokenizer."
        )
    return notes


def _notes_on_cost(
    config: Config, planned: Sequence[tuple[Work, Setup]], costs: Sequence[StageCost]
) -> list[str]:
    """Returns what controls and arms cost in all."""
    notes = list[str]()
    plain = {w.name: cost(dataclasses.replace(w, pool_size=0), setup) for w, setup in planned}
    flops = {stage.name: stage.flops for stage in costs}
    if has_controls(config):
        most = section(config, Report).max_controls
        notes.append(f"{WHY.format(most=most)}; the stage {FOLDER} counts all of the last.")
    in_all, needed = list[str](), dict[str, list[str]]()
    for settings in trained_arms(config):  # each after the one whose curriculum it follows
        names = [f"references_{name}" for name in settings.own_references]
        names += [SPECIALIST] if "specialist" in settings.own_references else []
        if (recorded := settings.waits_for) is not None:
            names += [recorded, *needed[recorded]]
        names = needed[settings.name] = list(dict.fromkeys(names))
        if names:
            steps = settings.train.steps
            of = plain[settings.name].flops * steps / (steps - (settings.variant.at or 0))
            own, others = flops[settings.name] / of, sum(flops[name] for name in names) / of
            in_all.append(f"{settings.name} {own:.2f} + {others:.2f}")
        elsewhere = settings.variant.curriculum
        if elsewhere is not None and not Path(elsewhere).exists():
            notes.append(
                f"{settings.name} follows {elsewhere}, which is not there: the run that records it "
                "is not planned here; plan that recipe, and add what its arm costs in all."
            )
    if in_all:
        notes.append(
            "cost in all, in plain runs, of the arm itself + its passes of references, its "
            f"specialist and the arm that it follows: {', '.join(in_all)}."
        )
    return notes


def _notes_on_time(stages: Stages, works: Sequence[tuple[Work, Setup]]) -> list[str]:
    """Returns notes that compare the measured time of the first 1,000 steps with the plan."""
    notes = []
    for work, setup in works:
        metrics = stages.results.arm(work.name) / "metrics.jsonl"
        if not work.steps or not metrics.is_file():
            continue
        planned, profile = cost(work, setup), setup.processor
        # a stated utilisation is what all of a step reaches
        whole = dataclasses.replace(profile, launch_seconds=0.0)
        computing = cost(work, dataclasses.replace(setup, processor=whole))
        with interpreting(metrics):
            rows = itertools.islice(each_line(metrics, "step"), 1_000)
            seconds = metrics_of(rows).values("timing/train/update")
            if not len(seconds):
                continue
            if (update := float(np.median(seconds))) <= 0:
                raise ValueError(f"steps of {update} s")
        notes.append(
            f"{planned.name} took {update:.3g} s a step, scoring aside; planned are "
            f"{planned.update_seconds:.3g}. plan.utilisation="
            f"{profile.utilisation * computing.update_seconds / update:.2g} would plan that."
        )
    return notes
