"""The work of a recipe's stages and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from nemo_rod.config import Parallel
from nemo_rod.plan.flops import forward_flops
from nemo_rod.plan.memory import Memory
from nemo_rod.plan.shapes import Shape
from nemo_rod.plan.speed import Speed
from nemo_rod.selection.dealing import scoring_passes


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one stage, in blocks.

    Attributes:
        name: name of the stage.
        steps: number of updates.
        batch_size: blocks per update.
        pool_size: candidates scored per update; 0 if none.
        eighths: scored eighths of every candidate.
        scored_share: share of the updates whose candidates are scored.
        read: blocks read once, forward only.
        cpu_seconds: time of work without a GPU.
        disk: bytes written and kept.
    """

    name: str
    steps: int = 0
    batch_size: int = 0
    pool_size: int = 0
    eighths: int = 8
    scored_share: float = 1.0
    read: float = 0.0
    cpu_seconds: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage.

    Attributes:
        name: name of the stage.
        trained_tokens: tokens trained on.
        scored_tokens: tokens read forward only, in training steps, over corpora or held out.
        flops: FLOPs of the model, padding of micro-batches included.
        hours: wall time.
        gpu_hours: time of all processes; 0 for stages without a GPU.
        scoring_seconds: mean scoring time per step.
        update_seconds: update time per step.
        disk: bytes written and kept.
    """

    name: str
    trained_tokens: float
    scored_tokens: float
    flops: float
    hours: float
    gpu_hours: float
    scoring_seconds: float
    update_seconds: float
    disk: float

    @property
    def scoring_share(self) -> float:
        """Scoring's share of the time of a step."""
        step = self.scoring_seconds + self.update_seconds
        return self.scoring_seconds / step if step else 0.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The throughput, layout and batch shapes of the work.

    Attributes:
        speed: speed of passes.
        parallel: parallel layout.
        block_size: tokens per block.
        micro_batch_size: blocks per training pass of one replica.
        scoring_micro_batch_size: whole blocks per forward-only pass of one replica.
        eighths: scored eighths of every block.
        host_seconds: time of an update of the optimizer on the host; 0 if it is on the GPU.
    """

    speed: Speed
    parallel: Parallel
    block_size: int
    micro_batch_size: int
    scoring_micro_batch_size: int
    eighths: int = 8
    host_seconds: float = 0.0

    def padded(self, num_blocks: float) -> tuple[float, int]:
        """Returns the blocks read when `num_blocks` are scored, and the passes per replica."""
        size, passes = scoring_passes(
            ceil(num_blocks),
            micro_batch_size=self.scoring_micro_batch_size,
            replicas=self.parallel.data,
            pipeline=self.parallel.pipeline,
            chunks=self.parallel.virtual_pipeline,
            eighths=self.eighths,
        )
        return float(size * passes * self.parallel.data), passes

    def scoring_seconds(self, num_blocks: float) -> float:
        """Returns the seconds of a forward-only pass over blocks."""
        blocks, passes = self.padded(num_blocks)
        return self.speed.forward(blocks * self.block_size, passes)

    def scoring_flops(self, num_blocks: float) -> float:
        """Returns the FLOPs of a forward-only pass over blocks, padding included."""
        return self.padded(num_blocks)[0] * self.block_size * self.speed.forward_flops


def of_prefix(setup: Setup, shape: Shape, eighths: int) -> Setup:
    """Returns the setup of a pass over the first eighths of every block."""
    if eighths == 8:
        return setup
    size = setup.block_size * eighths // 8
    flops = forward_flops(shape, setup.block_size, prefix=size)
    speed = replace(setup.speed, forward_flops=flops)
    return replace(setup, block_size=size, eighths=eighths, speed=speed)


def cost(work: Work, setup: Setup, shape: Shape) -> StageCost:
    """Returns the cost of one stage."""
    candidates = of_prefix(setup, shape, work.eighths)
    speed, size = setup.speed, setup.block_size
    scoring = update = 0.0
    flops = setup.scoring_flops(work.read)
    seconds = work.cpu_seconds + setup.scoring_seconds(work.read)
    if work.steps:
        num_micro_batches = work.batch_size // (setup.micro_batch_size * setup.parallel.data)
        update = speed.training(work.batch_size * size, num_micro_batches) + setup.host_seconds
        scoring = work.scored_share * candidates.scoring_seconds(work.pool_size)
        seconds += work.steps * (scoring + update)
        passes = 3.0 + speed.recomputed
        trained = passes * work.batch_size * size * speed.forward_flops
        scored = work.scored_share * candidates.scoring_flops(work.pool_size)
        flops += work.steps * (trained + scored)
    on_gpu = bool(work.steps or work.read)
    return StageCost(
        name=work.name,
        trained_tokens=float(work.steps * work.batch_size * size),
        scored_tokens=work.steps * work.scored_share * work.pool_size * candidates.block_size
        + work.read * size,
        flops=flops,
        hours=seconds / 3600,
        gpu_hours=seconds / 3600 * speed.processes if on_gpu else 0.0,
        scoring_seconds=scoring,
        update_seconds=update,
        disk=work.disk,
    )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """An option that reduces the cost.

    Attributes:
        what: description of the option.
        gpu_hours: reduction of the planned hours.
    """

    what: str
    gpu_hours: float


def prefix_saving(works: Sequence[Work], setup: Setup, shape: Shape, eighths: int) -> Saving:
    """Returns the saving of `works` from scoring only the first eighths of every block."""
    shorter = of_prefix(setup, shape, eighths)
    seconds = sum(
        work.steps
        * work.scored_share
        * (
            of_prefix(setup, shape, work.eighths).scoring_seconds(work.pool_size)
            - shorter.scoring_seconds(work.pool_size)
        )
        for work in works
    )
    return Saving(
        what=f"score the first {shorter.block_size:,} tokens of a block alone: "
        f"scoring.prefix=1/{8 // eighths}",
        gpu_hours=seconds / 3600 * setup.speed.processes,
    )


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """All results of `nemo-rod plan`.

    Attributes:
        recipe: name of the recipe.
        model: parameters and FLOPs.
        corpus: tokens of each role, and the source of these numbers.
        layout: processes and micro-batches.
        assumptions: numbers of the throughput model, and their source.
        memory: memory of the fullest GPU.
        stages: costs in execution order.
        savings: options that reduce the cost.
        notes: remarks on waste and on measured speed.
    """

    recipe: str
    model: dict[str, Any]
    corpus: dict[str, Any]
    layout: dict[str, Any]
    assumptions: dict[str, Any]
    memory: Memory
    stages: list[StageCost]
    savings: list[Saving] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gpu_hours(self) -> float:
        """Total of all stages."""
        return sum(stage.gpu_hours for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of plan.json."""
        result = asdict(self)
        result["stages"] = [
            {**asdict(stage), "scoring_share": stage.scoring_share} for stage in self.stages
        ]
        result["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        result["total"] = {
            "gpu_hours": self.gpu_hours,
            "hours": sum(stage.hours for stage in self.stages),
            "flops": sum(stage.flops for stage in self.stages),
            "disk": sum(stage.disk for stage in self.stages),
        }
        return result
