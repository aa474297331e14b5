"""Reads the files of one run folder into plain dataclasses.

    runs/<recipe>/blocks/<role>/<source>/manifest.json    training blocks of a source
    runs/<recipe>/arms/<arm>/evaluation.json              held-out losses by source
    runs/<recipe>/arms/<arm>/held_out_losses.npy          held-out losses by block
    runs/<recipe>/arms/<arm>/tasks.json                   accuracy by capability and task
    runs/<recipe>/arms/<arm>/arm.json                     design, and cost of training or merging
    runs/<recipe>/arms/<arm>/curriculum.rod               blocks drawn and trained on
    runs/<recipe>/arms/<arm>/metrics.jsonl                time per step, effect of prefixes

Only the evaluation is required; other missing files leave their columns empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from nemo_rod.bounds import has_type
from nemo_rod.files import expect_keys, interpreting, read_json
from nemo_rod.lab.history import History, read_history
from nemo_rod.lab.report.early_stops import Stops, stops_of
from nemo_rod.lab.report.under_way import Part, arm_folders, is_evaluated, read_part
from nemo_rod.roles import ROLES
from nemo_rod.run.held_out_losses import BLOCK_LOSSES
from nemo_rod.run.model_jobs import MACHINE_KEYS
from nemo_rod.selection import arms
from nemo_rod.selection.arm_names import ArmName, parse_arm
from nemo_rod.selection.candidates import Candidates

Losses = npt.NDArray[np.float64]

FREE = {"trained_tokens": 0, "scored_tokens": 0, "compute": 0.0}  # costs of a base not trained here
POOLS = tuple(item.name for item in fields(Candidates))  # facts that every trained arm has
_MOST_BLOCKS = 1 << 25  # held out
# Types of facts, besides null.
_TYPES: dict[str, Any] = {
    **get_type_hints(arms.Arm),
    **dict.fromkeys(("kind",), str),
    **dict.fromkeys(("steps", "block_size", "trained_tokens", "scored_tokens"), int),
    **dict.fromkeys(("compute", "wall_seconds", "budget"), float),
    **{"references": list[str], "train": dict[str, Any]},
}
# Keys of `train` that follow from an arm's length, and those that the machine decides.
_LENGTHS = ("steps", "warmup_steps", "decay_steps")
_MACHINE = {"micro_batch_size", *MACHINE_KEYS}
# Keys of a design that name, or follow from, the run that an arm is of.
_OF_RUN = {"references", "reference", "curriculum", "budget"}


@dataclass(frozen=True)
class Arm:
    """One arm of a run.

    `facts` are design and costs by the keys of `arm.json`: updates, tokens, plain steps (a forward
    pass of one trained batch counts 1/3), seconds; zero costs for the base. Also
    `seconds_per_step`, the median over the run, and `anneals_at`, the step from which the learning
    rate falls to the end; None if unknown.
    """

    name: ArmName
    seed: int | None  # seed of its evaluation or training
    loss: dict[str, dict[str, float]]  # held out, per source of each role, in nats per token
    tasks: dict[str, Any] | None  # configuration and results; None if none were run
    blocks: str | None  # digest of those that it was evaluated on; None if unknown
    facts: Mapping[str, Any]
    history: History | None  # None for arms that do not train
    # held-out loss of every block by role and source; empty if not kept
    block_losses: dict[str, dict[str, Losses]] = field(default_factory=dict)
    early_stops: Stops = field(default_factory=list)  # its validations; see `early_stops.py`

    @property
    def design(self) -> dict[str, Any] | None:
        """Keys of `arm.json` that distinguish the arm; None if not trained."""
        if self.facts.get("kind") != "trained":
            return None
        keys = ("steps", "budget", *arms.DESIGN, "references")
        train = self.facts.get("train") or {}
        schedule = {
            key: value for key, value in train.items() if key not in _LENGTHS and value != {}
        }
        return {**{key: self.facts.get(key) for key in keys}, "train": schedule}

    @property
    def accuracy(self) -> dict[str, float] | None:
        """Accuracy per capability in [0, 1], None if no tasks were run."""
        return self.tasks["capabilities"] if self.tasks else None


@dataclass(frozen=True)
class Run:
    """The files of one run of a recipe."""

    folder: Path
    recipe: str  # name of the folder
    arms: dict[str, Arm]  # evaluated ones by name, from the base through the baselines to RoD
    block_counts: dict[str, dict[str, int]]  # training blocks by role and source
    left_out: tuple[str, ...]  # names of arms that have files but no evaluation
    disagreements: list[str]  # a sentence on each evaluated arm that cannot be compared
    # of the held-out sources by role and source: their training blocks, unless a job weighs others
    weights: dict[str, dict[str, int]]

    @property
    def seed(self) -> int | None:
        """The seed of the trained arms; None if they differ."""
        trained = {arm.seed for arm in self.arms.values() if arm.history is not None}
        seeds = trained or {arm.seed for arm in self.arms.values()}
        return seeds.pop() if len(seeds) == 1 else None


def read_run(run_dir: Path, *, shared_dir: Path | None = None, parts: Sequence[Part] = ()) -> Run:
    """Reads a run folder.

    Blocks and base that it lacks are those of the run in `shared_dir`; `parts` were read before.

    Raises:
        ValueError: no arm has been evaluated, or a file is damaged.
    """
    folders = sorted(arm_folders(run_dir))
    evaluated = [folder for folder in folders if is_evaluated(folder)]
    if not evaluated:
        raise ValueError(
            f"{run_dir / 'arms'} has no <arm>/evaluation.json, expected one evaluated arm or more; "
            f"run `nemo-rod evaluate` for this recipe first"
        )
    blocks_dir = run_dir / "blocks"
    left_out = tuple(folder.name for folder in folders if folder not in evaluated)
    if shared_dir is not None:
        blocks_dir = blocks_dir if blocks_dir.is_dir() else shared_dir / "blocks"
        shared_base = shared_dir / "arms" / "base"
        if is_evaluated(shared_base) and not is_evaluated(run_dir / "arms" / "base"):
            evaluated.append(shared_base)
    block_counts: dict[str, dict[str, int]] = {role: {} for role in ROLES}
    for role in ROLES:
        for manifest in sorted((blocks_dir / role).glob("*/manifest.json")):
            count = read_json(manifest, "count")["count"]
            if type(count) is not int or count < 0:
                raise ValueError(
                    f"{manifest} has count={count!r}, expected a number: restore it from a copy, "
                    "or prepare the source again"
                )
            block_counts[role][manifest.parent.name] = count
    read, known = [], {part.name: part for part in parts if part.done is not None}
    for folder in evaluated:
        with interpreting(folder):
            read.append(_read_arm(folder, block_counts, known.get(folder.name)))
    read.sort(key=lambda arm: arm.name.order)
    comparable: dict[str, Arm] = {}
    disagreements = []
    with interpreting(run_dir / "arms"):
        for arm in read:
            name = arm.name.name
            with_tasks = next((other for other in comparable.values() if other.tasks), None)
            first = next(iter(comparable.values()), arm)
            if error := next(_disagreements(arm, first, with_tasks), None):
                disagreements.append(f"{run_dir}/arms/{name}/{error}; {name} is left out.")
            else:
                comparable[name] = arm
    if not comparable:
        raise ValueError(" ".join(disagreements))
    name = run_dir.resolve().name
    return Run(run_dir, name, comparable, block_counts, left_out, disagreements, block_counts)


def as_other_seed(run: Run, first: Run) -> Run:
    """Returns a run of another seed without the arms that differ from the first's in more."""
    kept, disagreements = {}, [*run.disagreements]
    for name, arm in run.arms.items():
        if (other := first.arms.get(name)) and (error := next(_differences(arm, other), None)):
            disagreements.append(f"{run.folder}/arms/{name}/{error}; {name} is left out.")
        else:
            kept[name] = arm
    return replace(run, arms=kept, disagreements=disagreements)


def _differences(arm: Arm, other: Arm) -> Iterator[str]:
    """Yields what tells an arm from the same one of another seed, besides the seed."""
    yield from _disagreements(arm, other, None)
    ours, theirs = (
        {**each.facts, **each.design, **each.design["train"]} if each.design else {}
        for each in (arm, other)
    )
    compared = {*arms.DESIGN, "steps", "batch_size", "block_size", *ours.get("train", {})}
    compared -= {*_OF_RUN, *_MACHINE, "share" if ours.get("share_of") else "", *_LENGTHS[1:]}
    compared -= {"steps"} if ours.get("convergence") else set()  # its end is open
    for key in sorted(compared):
        if ours.get(key) != theirs.get(key):
            yield (
                f"arm.json has {key}={ours.get(key)!r} but that of the first run "
                f"{theirs.get(key)!r}; runs are seeds of each other if only their seeds differ"
            )


def _read_arm(
    folder: Path, block_counts: Mapping[str, Mapping[str, int]], part: Part | None
) -> Arm:
    file = folder / "evaluation.json"
    evaluation = read_json(file, "loss")
    _check_facts(file, evaluation, cure="evaluate the arm again")
    with interpreting(file, cure="evaluate the arm again"):
        losses = {
            role: {n: float(loss) for n, loss in sorted(evaluation["loss"].get(role, {}).items())}
            for role in ROLES
        }
        blocks = evaluation.get("inputs", {}).get("blocks")
        if not isinstance(blocks, str | None):
            raise ValueError(f"inputs.blocks is {blocks!r}, expected a digest")
    for role, source in ((r, s) for r in ROLES for s in losses[r]):
        if source not in block_counts[role]:
            raise ValueError(
                f"{file} has {role} source {source!r}, but blocks/{role}/ has no manifest of it; "
                "evaluate the arm on this run's blocks"
            )
    arm_file, tasks_file = folder / "arm.json", folder / "tasks.json"
    name = parse_arm(folder.name)
    is_given = name.kind == "base" and not arm_file.is_file()
    facts = FREE if is_given else facts_of(arm_file, FREE if name.kind == "base" else {})
    curriculum_file, metrics_file = folder / "curriculum.rod", folder / "metrics.jsonl"
    for file in (curriculum_file, metrics_file) if facts.get("kind") == "trained" else ():
        if not file.is_file():
            raise ValueError(
                f"{file} is missing, expected one in every trained arm: restore it from a copy, "
                "or train the arm again"
            )
    history = read_history(curriculum_file) if curriculum_file.is_file() else None
    if history and facts.get("kind") == "trained":
        found = {f"num_{role}": sum(block_counts[role].values()) for role in ROLES}
        found["batch_size"] = history.batch_size
        if wrong := {key: facts[key] for key, value in found.items() if facts[key] != value}:
            raise ValueError(
                f"{arm_file} has {wrong}, but the run's blocks and {curriculum_file.name} have "
                f"{found}: restore the file from a copy, or train the arm again"
            )
    part = part or read_part(folder, name.name)
    metrics = part.metrics
    if metrics_file.is_file() and facts.get("steps") not in (None, len(metrics)):
        raise ValueError(
            f"{metrics_file} holds {len(metrics)} steps, but arm.json has steps={facts['steps']}: "
            "restore the file from a copy, or train the arm again"
        )
    seconds, lr = metrics.values("timing/train/total"), metrics.values("train/lr")
    peak = len(lr) - 1 - int(lr[::-1].argmax()) if len(lr) else 0
    tasks = None
    if tasks_file.is_file():
        tasks = read_json(tasks_file, "configuration", "capabilities", "tasks")
    return Arm(
        name=name,
        seed=evaluation.get("seed", facts.get("seed")),
        loss=losses,
        tasks=tasks,
        blocks=blocks,
        facts={
            **facts,
            "seconds_per_step": float(np.median(seconds)) if len(seconds) else None,
            "anneals_at": peak + 1 if 0 < peak < len(lr) - 1 else None,
        },
        history=history,
        block_losses=_read_block_losses(folder, evaluation),
        early_stops=stops_of(metrics, part.start, block_counts),
    )


def _read_block_losses(folder: Path, evaluation: Mapping[str, Any]) -> dict[str, dict[str, Losses]]:
    file = folder / BLOCK_LOSSES
    if not file.is_file():  # they were not kept
        return {}
    with interpreting(file, cure="evaluate the arm again"):
        counts = {(r, s): n for r, by in evaluation["blocks"].items() for s, n in by.items()}
        mapped, total = np.load(file, mmap_mode="r"), sum(counts.values())
        if mapped.shape != (total,) or total > _MOST_BLOCKS:
            raise ValueError(f"it holds {mapped.shape} losses, and evaluation.json {total} blocks")
        parts = np.split(mapped.astype(np.float64), np.cumsum(list(counts.values()))[:-1])
        losses: dict[str, dict[str, Losses]] = {}
        for (role, source), part in zip(counts, parts, strict=True):
            losses.setdefault(role, {})[source] = part
            told = evaluation["loss"][role][source]
            if math.isfinite(told) and not math.isclose(part.mean(), told, rel_tol=1e-6):
                raise ValueError(
                    f"the blocks of {source} have a mean loss of {part.mean():.6g}, and "
                    f"evaluation.json has {told}"
                )
    return losses


def facts_of(file: Path, others: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, Any]:
    """Returns the content of an `arm.json`, and what others it lacks."""
    facts = {**others, **read_json(file, "kind", "steps")}
    needed = ("steps", *POOLS) if facts["kind"] == "trained" else ()
    expect_keys(file, facts, needed)
    _check_facts(file, facts, needed, cure="train the arm again")
    return facts


def _check_facts(
    file: Path, facts: Mapping[str, Any], needed: Sequence[str] = (), *, cure: str
) -> None:
    """Refuses facts of other types than `_TYPES` has, null if needed, and infinite numbers."""
    for key, kind in _TYPES.items():
        value = facts.get(key)
        if not has_type(value, kind if key in needed else kind | None) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise ValueError(
                f"{file} has {key}={value!r}, which is no valid value: "
                f"restore it from a copy, or {cure}"
            )


def _disagreements(arm: Arm, first: Arm, with_tasks: Arm | None) -> Iterator[str]:
    """Yields reasons why an arm's losses or accuracies cannot be compared with those of others."""
    for role, source, loss in ((r, s, n) for r in ROLES for s, n in arm.loss[r].items()):
        if not math.isfinite(loss):
            yield (
                f"evaluation.json has the loss {loss} for {role} source {source!r}: its model has "
                f"diverged; train it again at a lower train.lr, with rebuild=[{arm.name.name}]"
            )
    if arm.blocks and first.blocks and arm.blocks != first.blocks:
        yield (
            f"evaluation.json is of blocks {arm.blocks} but that of arm {first.name.name!r} of "
            f"{first.blocks}; evaluate both on the same blocks"
        )
    for role in ROLES:
        actual, expected = sorted(arm.loss[role]), sorted(first.loss[role])
        if actual != expected:
            yield (
                f"evaluation.json has {role} sources {actual} but arm {first.name.name!r} has "
                f"{expected}; evaluate both on the same blocks"
            )
    if arm.tasks and with_tasks and with_tasks.tasks:
        settings = [("", arm.tasks["configuration"], with_tasks.tasks["configuration"])]
        for name, entry in arm.tasks["tasks"].items():
            theirs = with_tasks.tasks["tasks"].get(name, {}).get("leaves", {})
            for leaf, ours in entry["leaves"].items():
                same = {key: ours[key] for key in ("version", "few_shot", "prompts")}
                settings.append((f" of {leaf}", same, theirs.get(leaf, {})))
        for where, actual, expected in settings:
            for key, value in actual.items():
                if value != expected.get(key):
                    yield (
                        f"tasks.json has {key}{where} {value} but arm {with_tasks.name.name!r} has "
                        f"{expected.get(key)}; ask both again with one task configuration"
                    )
