"""Profiles of processors: the peak, and the share of it that a family of models reaches.

The shares are those of measured runs, a table with a source for each (speeds.csv); every other
number here is an assumption with a source. A key of `plan` overrides any of them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from statistics import geometric_mean
from typing import Any, get_type_hints

from nemo_rod.config import PEAK_TFLOPS, Config, section
from nemo_rod.lab.plan.section import Plan
from nemo_rod.lab.plan.shapes import Shape


@dataclass(frozen=True)
class Processor:
    """The processor of one process."""

    name: str  # name as in `cluster.gpu`
    peak_tflops: float  # peak of matrix products in `precision`, without sparsity
    precision: str  # "bf16" or "fp32"
    utilisation: float  # share of the peak that training reaches
    backward: float  # time of a backward pass, in forward passes
    scoring: float  # time of a scoring pass, in forward passes of training
    source: str  # origin of the numbers
    startup_seconds: float = 60.0  # assumed; with GPUs, the cluster's file system decides
    # the least time of a micro-batch's update, for each residual block: kernels must be launched
    launch_seconds: float = 0.0
    range: tuple[float, float] = (0.0, 0.0)  # the least and the greatest share that was measured
    confidence: str = ""  # what the share was measured with, in words


@dataclass(frozen=True)
class Measured:
    """A row of speeds.csv: a training run whose speed was published."""

    model: str
    family: str  # see `family`
    kind: str  # Hugging Face's model type
    gpu: str
    peak: float  # dense bf16 peak of a GPU in TFLOP/s, whatever the precision
    gpus: int
    precision: str  # "bf16", "fp8" or "mxfp8"
    data: str  # "text", as a recipe runs; or "mock": tuned, experts balanced by force
    block: int  # tokens
    micro_batch: int  # blocks
    tokens_per_second: float  # speed of one GPU
    tflops: float  # the model's FLOP/s on one GPU
    source: str

    @property
    def share(self) -> float:
        """Share of the bf16 peak; above that of bf16 in a lower precision."""
        return self.tflops / self.peak


# One H100 (docs/research/gpu.md, smollm2.md): a step of RoD with m = 2 took 1.62 plain ones at .5 B
# and 1.5 at 135 M, so that scoring a block took .93 and .75 of a third of its update; the mean.
_SCORING = 0.84
# One H100: .127 s for a micro-batch of 48 residual blocks without a trainer (.5 B), .245 s for one
# of 60 in Megatron-Bridge's (135 M, which left the GPU half idle); the geometric mean.
_LAUNCH_SECONDS = 0.0033
_HOPPER, _BLACKWELL = ("H100", "H200", "GH200"), ("B200", "B300", "GB200", "GB300")
_SHEETS = {
    **{name: f"{name} SXM data sheet" for name in ("H100", "H200", "A100")},
    **{"B200": "DGX B200 data sheet", "B300": "HGX B300 data sheet"},
    **{name: f"{name} data sheet" for name in ("L40S", "GH200")},
    "RTX_4090": "Ada white paper, with FP32 accumulation",
    "RTX_5090": "RTX Blackwell white paper, with FP32 accumulation",
}


def speeds() -> list[Measured]:
    """Returns the rows of speeds.csv."""
    text = (files(__package__) / "speeds.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    types = get_type_hints(Measured)
    return [Measured(**{key: types[key](value) for key, value in row.items()}) for row in rows]


def family(shape: Shape) -> str:
    """Returns a model's family: what its token mixers are, and whether it has experts.

    "dense" (attention), "hybrid" (with Mamba-2), "gdn" (with the gated delta rule), "moe",
    "hybrid_moe" or "gdn_moe".
    """
    kinds = {block.kind for block in shape.blocks}
    mixer = "hybrid" if "mamba" in kinds else "gdn" if "delta" in kinds else ""
    return "_".join(filter(None, (mixer, "moe" if shape.has_experts else ""))) or "dense"


def nearest(
    rows: Sequence[Measured], shape: Shape, gpu: str, *, precision: str = "bf16", data: str = "text"
) -> tuple[list[Measured], list[Measured]]:
    """Returns the measured runs that a model's share is taken from, and all those of its family.

    Of its family's, those in that precision, of its model type, on GPUs of the same generation, on
    that kind of data, and on that GPU: in this order, as far as there are any.
    """
    generation = _BLACKWELL if gpu in _BLACKWELL else _HOPPER
    chosen = [row for row in rows if row.family == family(shape)]
    chosen = of_family = [row for row in chosen if row.precision == precision] or chosen
    chosen = [row for row in chosen if row.kind == shape.kind] or chosen
    chosen = [row for row in chosen if row.gpu in generation] or chosen
    chosen = [row for row in chosen if row.data == data] or chosen
    return [row for row in chosen if row.gpu == gpu] or chosen, of_family


def _gpu(name: str, peak: float, shape: Shape, sheet: str) -> Processor:
    """Returns the profile of a GPU that trains a model in bf16."""
    rows, of_family = nearest(speeds(), shape, name)
    models = ", ".join(sorted({f"{row.model} on {row.gpus} {row.gpu}" for row in rows}))
    own = all(row.kind == shape.kind for row in rows)
    generation = _BLACKWELL if name in _BLACKWELL else _HOPPER
    here = name in generation and all(row.gpu in generation for row in rows)
    confidence = (
        f"{models}, {'tuned' if rows[0].data == 'mock' else 'on text'}"
        f"{'' if own else ', other models of its family'}"
        f"{'' if here else f', nothing of which ran on a {name}'}"
    )
    sources = "; ".join(sorted({f"{row.model}: {row.source}" for row in rows}))
    return Processor(
        *(name, peak, "bf16", geometric_mean(row.share for row in rows), 2.0, _SCORING),
        source=f"peak as in {sheet}; share of it as measured (Megatron-Bridge's {sources})",
        launch_seconds=_LAUNCH_SECONDS,
        range=(min(row.share for row in of_family), max(row.share for row in of_family)),
        confidence=confidence,
    )


CPU = Processor(
    *("CPU", 0.08, "fp32", 0.35, 1.5, 1.0),
    "one AVX2 core at 2.5 GHz; utilisation and backward measured with the toy's model, whose small "
    "tensors cost a forward pass almost what they cost a backward pass; so is the start-up",
    startup_seconds=8.0,
)


def processor(config: Config, shape: Shape) -> Processor:
    """Returns the processor of a recipe for its model, with the recipe's overrides.

    Raises:
        ValueError: for a GPU without a profile, unless `plan` states its peak.
    """
    name, plan, precision = config.cluster.gpu, section(config, Plan), config.model.precision
    if name is None:
        profile = CPU
    elif name in PEAK_TFLOPS:
        profile = _gpu(name, PEAK_TFLOPS[name][precision], shape, f"NVIDIA's {_SHEETS[name]}")
    elif plan.peak_tflops is None:
        raise ValueError(
            f"cluster.gpu={name!r} has no profile: expected one of {', '.join(PEAK_TFLOPS)}; or "
            "set plan.peak_tflops to the peak in its data sheet, without sparsity."
        )
    else:
        profile = _gpu(name, plan.peak_tflops, shape, "plan.peak_tflops")
    keys = ("utilisation", "peak_tflops", "startup_seconds")
    given: dict[str, Any] = {key: getattr(plan, key) for key in keys} | {"precision": precision}
    if plan.utilisation:  # stated: the recipe knows better
        given |= {"confidence": "", "range": (0.0, 0.0), "launch_seconds": 0.0}
    return replace(profile, **{key: value for key, value in given.items() if value is not None})
