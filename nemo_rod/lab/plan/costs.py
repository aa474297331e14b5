"""The work of a recipe's stages and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from nemo_rod.config import Parallel
from nemo_rod.lab.plan.memory import Memory
from nemo_rod.lab.plan.shapes import Shape, forward_flops, recomputed_share
from nemo_rod.lab.plan.speed import Processor
from nemo_rod.selection.dealing import scoring_passes

CHECKPOINT_RATE = 5e9  # bytes of a checkpoint written per second, all nodes together


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one stage, in blocks."""

    name: str  # name of the stage
    steps: int = 0  # number of updates
    batch_size: int = 0  # blocks per update
    pool_size: int = 0  # candidates scored per update; 0 if none
    prefix: float = 1.0  # scored share of every candidate, from its start
    read: float = 0.0  # blocks read once, forward only
    cpu_seconds: float = 0.0  # time of work without a GPU
    saved: float = 0.0  # bytes of checkpoints, for which training waits
    disk: float = 0.0  # bytes written and kept


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """The cost of one stage."""

    name: str  # name of the stage
    trained_tokens: float  # tokens trained on
    scored_tokens: float  # tokens read forward only, in training steps, over corpora or held out
    flops: float  # FLOPs of the model, padding of micro-batches included
    hours: float  # wall time
    gpu_hours: float  # time of all processes; 0 for stages without a GPU
    scoring_seconds: float  # mean scoring time per step
    update_seconds: float  # update time per step
    disk: float  # bytes written and kept

    @property
    def scoring_share(self) -> float:
        """Scoring's share of the time of a step."""
        step = self.scoring_seconds + self.update_seconds
        return self.scoring_seconds / step if step else 0.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model, processors, layout and batch shapes of the work."""

    shape: Shape  # shape of the model
    processor: Processor  # the processor of every process
    parallel: Parallel  # parallel layout
    block_size: int  # tokens per block
    micro_batch_size: int  # see `config.Optimisation`
    scoring_micro_batch_size: int  # see `config.Scoring`
    recompute: str = "none"  # see `config.Optimisation`
    prefix: float = 1.0  # scored share of every block, from its start
    # time of an update of the optimizer on the host; 0 if it is on the GPU
    host_seconds: float = 0.0

    @property
    def forward_flops(self) -> float:
        """Forward FLOPs per token."""
        return forward_flops(self.shape, self.block_size)

    @property
    def recomputed_share(self) -> float:
        """Share of a forward pass that a backward pass computes again."""
        return recomputed_share(self.shape, self.block_size, self.recompute)

    def forward_seconds(
        self, tokens: float, num_micro_batches: float, *, share: float = 1.0
    ) -> float:
        """Returns the seconds of forward passes over the tokens of all replicas.

        Args:
            tokens: those of all replicas.
            num_micro_batches: of a replica.
            share: of the time of training's forward pass; launching kernels takes all of it.
        """
        processor, stages = self.processor, self.parallel.pipeline
        reached = processor.peak_tflops * 1e12 * processor.utilisation  # FLOP/s of one process
        ideal = max(
            share * 3.0 * self.forward_flops * tokens / (self.parallel.world_size * reached),
            num_micro_batches * (processor.launch_seconds * len(self.shape.blocks)) / stages,
        )
        # the pipeline's bubble, while stages fill and drain
        bubble = (stages - 1) / (self.parallel.virtual_pipeline * max(1.0, num_micro_batches))
        return ideal / (1.0 + processor.backward) * (1.0 + bubble)

    def training_seconds(self, tokens: float, num_micro_batches: float) -> float:
        """Returns the seconds of forward and backward passes over the tokens of all replicas."""
        passes = 1.0 + self.processor.backward + self.recomputed_share
        return passes * self.forward_seconds(tokens, num_micro_batches)

    def padded_blocks(self, num_blocks: float) -> tuple[float, int]:
        """Returns the blocks read when `num_blocks` are scored, and the passes per replica."""
        size, passes = scoring_passes(
            ceil(num_blocks),
            micro_batch_size=self.scoring_micro_batch_size,
            replicas=self.parallel.data,
            pipeline=self.parallel.pipeline,
            chunks=self.parallel.virtual_pipeline,
            prefix=self.prefix,
        )
        return float(size * passes * self.parallel.data), passes

    def scoring_seconds(self, num_blocks: float) -> float:
        """Returns the seconds of a forward-only pass over blocks."""
        blocks, passes = self.padded_blocks(num_blocks)
        return self.forward_seconds(blocks * self.block_size, passes, share=self.processor.scoring)

    def scoring_flops(self, num_blocks: float) -> float:
        """Returns the FLOPs of a forward-only pass over blocks, padding included."""
        return self.padded_blocks(num_blocks)[0] * self.block_size * self.forward_flops


def cost(work: Work, setup: Setup) -> StageCost:
    """Returns the cost of one stage."""
    size, prefix = setup.block_size, work.prefix
    candidates = replace(setup, block_size=int(size * prefix), prefix=prefix)
    scoring = update = 0.0
    flops = setup.scoring_flops(work.read)
    seconds = work.cpu_seconds + setup.scoring_seconds(work.read)
    if work.steps:
        num_micro_batches = work.batch_size // (setup.micro_batch_size * setup.parallel.data)
        update = setup.training_seconds(work.batch_size * size, num_micro_batches)
        update += setup.host_seconds
        scoring = candidates.scoring_seconds(work.pool_size)
        seconds += work.steps * (scoring + update) + work.saved / CHECKPOINT_RATE
        passes = 3.0 + setup.recomputed_share
        trained = passes * work.batch_size * size * setup.forward_flops
        scored = candidates.scoring_flops(work.pool_size)
        flops += work.steps * (trained + scored)
    on_gpu = bool(work.steps or work.read)
    seconds += setup.processor.startup_seconds * on_gpu
    return StageCost(
        name=work.name,
        trained_tokens=float(work.steps * work.batch_size * size),
        scored_tokens=work.steps * work.pool_size * candidates.block_size + work.read * size,
        flops=flops,
        hours=seconds / 3600,
        gpu_hours=seconds / 3600 * setup.parallel.world_size if on_gpu else 0.0,
        scoring_seconds=scoring,
        update_seconds=update,
        disk=work.disk,
    )


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """All results of `nemo-rod plan`."""

    recipe: str  # name of the recipe
    model: dict[str, Any]  # parameters and FLOPs
    corpus: dict[str, Any]  # tokens of each role, and the source of these numbers
    layout: dict[str, Any]  # processes and micro-batches
    assumptions: dict[str, Any]  # numbers of the throughput model, and their source
    memory: Memory  # memory of the fullest GPU
    stages: list[StageCost]  # costs in execution order
    notes: list[str] = field(default_factory=list)  # remarks on waste and on measured speed

    def total(self, key: str) -> float:
        """Returns the sum of an attribute over all stages."""
        return sum(getattr(stage, key) for stage in self.stages)

    @property
    def gpu_hours(self) -> float:
        """Total of all stages."""
        return self.total("gpu_hours")

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of plan.json."""
        result = asdict(self)
        result["stages"] = [
            {**asdict(stage), "scoring_share": stage.scoring_share} for stage in self.stages
        ]
        result["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        keys = ("gpu_hours", "hours", "flops", "disk")
        result["total"] = {key: self.total(key) for key in keys}
        return result
