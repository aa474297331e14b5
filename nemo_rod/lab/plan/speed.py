"""Profiles of processors: the peak, and the share of it that training reaches.

Every number here is an assumption with a source, and a key of `plan` overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_rod.config import Config, section
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


def _gpu(
    name: str, peak_tflops: float, precision: str, sheet: str, fp32_tflops: float | None = None
) -> Processor:
    source = f"peak as in {sheet}; {_BRIDGE}; {_SCORING}"
    return Processor(
        name, peak_tflops, precision, 0.35, 0.16, 2.0, 0.76, source, fp32_tflops=fp32_tflops
    )


PROCESSORS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", 989.0, "bf16", "NVIDIA's H100 SXM data sheet", 67.0),
        _gpu("H200", 989.0, "bf16", "NVIDIA's H200 SXM data sheet", 67.0),
        _gpu("B200", 2250.0, "bf16", "NVIDIA's DGX B200 data sheet", 75.0),
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
        profile = _gpu(name, plan.peak_tflops, config.model.precision, "plan.peak_tflops")
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


def known_peak(config: Config) -> float | None:
    """Returns the dense peak TFLOP/s of a GPU of the recipe's cluster, if both are known.

    A job's configuration has no section `plan`, whose `peak_tflops` is not taken into account.
    """
    gpu = PROCESSORS.get(config.cluster.gpu or "")
    if gpu is None:
        return None
    return {gpu.precision: gpu.peak_tflops, "fp32": gpu.fp32_tflops}.get(config.model.precision)
