"""Profiles of processors: the peak, and the share of it that training reaches.

Every number here is an assumption with a source, and a key of `plan` overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_rod.config import PEAK_TFLOPS, Config, section
from nemo_rod.lab.plan.section import Plan


@dataclass(frozen=True)
class Processor:
    """The processor of one process."""

    name: str  # name as in `cluster.gpu`
    peak_tflops: float  # peak of matrix products in `precision`, without sparsity
    precision: str  # "bf16" or "fp32"
    utilisation: float  # share of the peak that training reaches, all layers dense
    utilisation_experts: float  # the same with routed experts
    backward: float  # time of a backward pass, in forward passes
    scoring: float  # time of a scoring pass, in forward passes of training
    source: str  # origin of the numbers
    startup_seconds: float = 60.0  # assumed; with GPUs, the cluster's file system decides
    fp32_tflops: float | None = None  # peak of a GPU in fp32


_BRIDGE = (
    "utilisation as in Megatron-Bridge's performance summary: dense 0.35 (Llama 3 8B, FP8, release "
    "25.11: 744 of 1,979 TFLOP/s on H100, 1,576 of 4,500 on B200), with experts 0.16 (GPT-OSS "
    "120B, BF16, release 26.04.01: 158 of 989 on H100, 369 of 2,250 on B200)"
)
_SCORING = (
    "scoring as measured on one H100, the slower of two cross entropies in training: 1.31 times as "
    "fast as its forward pass, which keeps activations"
)


def _gpu(name: str, peaks: Mapping[str, float], precision: str, sheet: str) -> Processor:
    source = f"peak as in {sheet}; {_BRIDGE}; {_SCORING}"
    fp32 = peaks.get("fp32")
    return Processor(
        name, peaks[precision], precision, 0.35, 0.16, 2.0, 0.76, source, fp32_tflops=fp32
    )


PROCESSORS = {
    name: _gpu(name, PEAK_TFLOPS[name], "bf16", f"NVIDIA's {sheet}")
    for name, sheet in (
        ("H100", "H100 SXM data sheet"),
        ("H200", "H200 SXM data sheet"),
        ("B200", "DGX B200 data sheet"),
        # utilisation and scoring of those below are assumed to be the same
        ("A100", "A100 SXM data sheet"),
        ("L40S", "L40S data sheet"),
        ("RTX_4090", "Ada white paper, with FP32 accumulation"),
        ("RTX_5090", "RTX Blackwell white paper, with FP32 accumulation"),
        ("GH200", "GH200 data sheet"),
        ("B300", "HGX B300 data sheet"),
    )
}
CPU = Processor(
    *("CPU", 0.08, "fp32", 0.35, 0.35, 1.5, 1.0),
    "one AVX2 core at 2.5 GHz; utilisation and backward measured with the toy's model, whose small "
    "tensors cost a forward pass almost what they cost a backward pass; so is the start-up",
    startup_seconds=8.0,
)


def processor(config: Config, *, has_experts: bool) -> Processor:
    """Returns the processor of a recipe, with the recipe's overrides and its `utilisation`.

    Raises:
        ValueError: for a GPU or a precision without a profile, unless `plan` states the peak.
    """
    name, plan = config.cluster.gpu, section(config, Plan)
    if name is None:
        profile = CPU
    elif name in PROCESSORS:
        profile = PROCESSORS[name]
    elif plan.peak_tflops is None:
        raise ValueError(
            f"cluster.gpu={name!r} has no profile: expected one of {', '.join(PROCESSORS)}; or set "
            "plan.peak_tflops to the peak in its data sheet, without sparsity."
        )
    else:
        precision = config.model.precision
        profile = _gpu(name, {precision: plan.peak_tflops}, precision, "plan.peak_tflops")
    if config.model.precision == "fp32" and profile.fp32_tflops is not None:
        profile = replace(profile, peak_tflops=profile.fp32_tflops, precision="fp32")
    if config.model.precision != profile.precision and plan.peak_tflops is None:
        cure = "add cluster=h100_8, h200_8, b200_8 or h100_1, or " if name is None else ""
        raise ValueError(
            f"The profile of {profile.name} is for {profile.precision}, and model.precision="
            f"{config.model.precision}: {cure}set plan.peak_tflops to its peak in that precision."
        )
    startup = plan.startup_seconds
    return replace(
        profile,
        peak_tflops=plan.peak_tflops or profile.peak_tflops,
        utilisation=plan.utilisation
        or (profile.utilisation_experts if has_experts else profile.utilisation),
        backward=plan.backward or profile.backward,
        startup_seconds=profile.startup_seconds if startup is None else startup,
        scoring=plan.scoring or profile.scoring,
    )
