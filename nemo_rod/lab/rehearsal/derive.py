"""From a resolved recipe to its rehearsal's: a function, so that nothing is written twice.

Sizes, paths and counts of processes change; every other key stays as the recipe has it.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rod.config import Config, Optimisation, Parallel, section
from nemo_rod.lab.rehearsal.forms import BLOCK_SIZE
from nemo_rod.lab.rehearsal.made_documents import small_source
from nemo_rod.lab.rehearsal.special_tokens import special_tokens
from nemo_rod.lab.report.section import Report
from nemo_rod.lab.tasks.section import Tasks
from nemo_rod.run.variants import arm_settings

BATCH_SIZE = 8  # blocks; the same in every rehearsal, for curricula are handed on
_SCORING_MICRO_BATCH = 4  # blocks at most
_HELD_OUT_QUESTIONS = 8


@dataclass(frozen=True)
class Places:
    """Where a rehearsal keeps what it makes.

    Attributes:
        folder: its run folder.
    """

    folder: Path

    @property
    def made(self) -> Path:
        """Folder of the made documents, tokenizers and checkpoint."""
        return self.folder / "made"

    @property
    def checkpoint(self) -> Path:
        """The base model in small."""
        return self.made / "checkpoint"

    @property
    def tasks(self) -> Path:
        """Folder of the definitions that stand in for benchmark tasks."""
        return self.made / "tasks"

    def tokenizer(self, name: str) -> Path:
        """Returns the folder of another model's tokenizer."""
        return self.made / "tokenizers" / name.replace("/", "--")

    def other(self, run: str) -> Path:
        """Returns the folder of the rehearsal of another run that this one uses."""
        return self.folder / "others" / run.strip("/.").replace("/", "--")


def rehearsal_of(config: Config, folder: Path, *, parallel: Parallel, scale: float) -> Config:
    """Returns the configuration of a recipe's rehearsal.

    Args:
        config: the checked configuration of the recipe.
        folder: run folder of the rehearsal.
        parallel: its layout.
        scale: its steps over those of the recipe.
    """
    places, small = Places(folder.absolute()), copy.deepcopy(config)
    small.run_dir = str(places.folder)
    small.parallel = parallel
    small.rebuild, small.arm = [], None
    if config.model.hf is not None:
        small.model.hf, small.model.shape = str(places.checkpoint), None
    small.domain = dataclasses.replace(
        config.domain,
        **_tokenizer(config, places),
        block_size=BLOCK_SIZE,
        holdout_floor=_floor(config),
        workers=min(config.domain.workers, 2),
        sources={
            spec.name: config.domain.sources[spec.name]
            | small_source(spec, places.made, block_size=BLOCK_SIZE)
            for spec in config.domain.specs
        },
    )
    small.train = _schedule(config.train, parallel, scale)
    small.pretrain = config.pretrain and _schedule(config.pretrain, parallel, scale)
    small.scoring.micro_batch_size = min(config.scoring.micro_batch_size, _SCORING_MICRO_BATCH)
    small.checkpoint.every = max(1, small.train.steps // 2)
    small.validation.every = small.train.steps // 2 if config.validation.every else 0
    small.validation.blocks = min(config.validation.blocks, 2)
    small.variants = {n: _variant(v, places, scale) for n, v in config.variants.items()}
    small.cluster.gpu_memory_gib = 0.0  # the plan knows none of these small models' needs
    small.cluster.gpus_per_node = _per_node(config, parallel)
    small.cluster.node_memory_gib = 0.0
    shown, tasks = section(small, Report), section(small, Tasks)
    shown.seeds, shown.settings = [], []
    tasks.limit = min(tasks.limit or _HELD_OUT_QUESTIONS, _HELD_OUT_QUESTIONS)
    tasks.held_out = min(tasks.held_out, _HELD_OUT_QUESTIONS)
    if tasks.capabilities:
        tasks.include = str(places.tasks)
    return small


def other_runs(config: Config) -> dict[str, list[str]]:
    """Returns the folders of other runs that the recipe's arms use, and the arms used of each."""
    found: dict[str, list[str]] = {}
    for name in config.arms:
        variant = arm_settings(config, name).variant
        if variant.reference is not None:
            # its specialist's losses are made for an arm that scores
            found.setdefault(variant.reference, []).extend(["no_replay", "rod"])
        if variant.curriculum is not None:
            run, arm = run_and_arm(variant.curriculum)
            found.setdefault(run, []).append(arm)
    return {run: list(dict.fromkeys(arms)) for run, arms in found.items()}


def run_and_arm(folder: str) -> tuple[str, str]:
    """Returns the run and the arm of a folder with a curriculum: RUN or RUN/arms/ARM."""
    run, _, arm = folder.rstrip("/").partition("/arms/")
    return run, arm or "rod"


def _floor(config: Config) -> int | None:
    """Returns the recipe's floor of held-out blocks, or one of a block for each question."""
    floor = config.domain.holdout_floor
    documents = any(spec.document_holdout for spec in config.domain.specs)
    return (
        max(floor or 0, _HELD_OUT_QUESTIONS)
        if section(config, Tasks).held_out and not documents
        else floor
    )


def _tokenizer(config: Config, places: Places) -> dict[str, Any]:
    """Returns the keys of the domain's tokenizer in small."""
    name = config.domain.tokenizer
    if name == "byte":
        return {}
    own = places.checkpoint if name == config.model.hf else places.tokenizer(name)
    keys: dict[str, Any] = {"tokenizer": str(own)}
    if (eod := config.domain.eod) is not None:
        tokens = special_tokens(name)
        keys["eod"] = tokens.small_ids().get(tokens.name_of(eod), eod)
    return keys


def _schedule(train: Optimisation, parallel: Parallel, scale: float) -> Optimisation:
    # every replica adds up the gradients of two micro-batches or more, and pipelines stay busy
    most = 2 if parallel.data * parallel.pipeline <= 2 else 1
    small = dataclasses.replace(
        train, micro_batch_size=min(train.micro_batch_size, most), batch_size=BATCH_SIZE
    )
    for name, steps in _small_steps_of(dataclasses.asdict(train), scale).items():
        setattr(small, name, steps)
    return small


def _variant(variant: Any, places: Places, scale: float) -> Any:
    changed = dict(variant or {})
    if changed.get("steps") is not None:
        changed |= _small_steps_of({"steps": changed["steps"]}, scale)
    if changed.get("curriculum") is not None:
        run, arm = run_and_arm(changed["curriculum"])
        changed["curriculum"] = str(places.other(run) / "arms" / arm)
    if changed.get("reference") is not None:
        changed["reference"] = str(places.other(changed["reference"]))
    for part in ("train", "scoring"):
        if changed.get(part):
            kept = dict(changed[part])
            for chosen_here in ("batch_size", "micro_batch_size"):
                kept.pop(chosen_here, None)
            changed[part] = kept | _small_steps_of(kept, scale)
    return changed


def _small_steps_of(values: dict[str, Any], scale: float) -> dict[str, int]:
    """Returns the keys of a schedule that are steps, in small; a warm-up may vanish."""
    least = {"steps": 1, "warmup_steps": 0, "decay_steps": 1}
    return {
        name: max(fewest, round(values[name] * scale))
        for name, fewest in least.items()
        if values.get(name) is not None
    }


def _per_node(config: Config, parallel: Parallel) -> int:
    """Returns the processes of a node: a run on several nodes is rehearsed on two."""
    on_one = config.cluster.gpus_per_node
    if not on_one or config.parallel.world_size <= on_one or parallel.world_size < 2:
        return on_one
    return parallel.world_size // 2


def made_tokenizers(config: Config, folder: Path) -> dict[str, str]:
    """Returns the tokenizers that the rehearsal needs: folder -> name of the published one."""
    places, found = Places(folder.absolute()), {}
    if config.model.hf is not None:
        found[str(places.checkpoint)] = config.model.hf
    if config.domain.tokenizer not in ("byte", config.model.hf):
        found[str(places.tokenizer(config.domain.tokenizer))] = config.domain.tokenizer
    return found
