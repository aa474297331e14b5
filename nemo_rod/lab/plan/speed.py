"""FLOPs -> seconds: a processor's peak, the share that training reaches, and pipeline bubbles.

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
    source: str  # origin of the numbers


_BRIDGE = (
    "utilisation as in Megatron-Bridge's performance summary: dense 0.35 (Llama 3 8B, FP8, release "
    "25.11: 744 of 1,979 TFLOP/s on H100, 1,576 of 4,500 on B200), with experts 0.16 (GPT-OSS "
    "120B, BF16, release 26.04.01: 158 of 989 on H100, 369 of 2,250 on B200)"
)


def _gpu(name: str, peak_tflops: float, precision: str, sheet: str) -> Processor:
    source = f"peak as in {sheet}; {_BRIDGE}"
    return Processor(name, peak_tflops, precision, 0.35, 0.16, 2.0, source)


PROCESSORS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100", 989.0, "bf16", "NVIDIA's H100 SXM data sheet"),
        _gpu("H200", 989.0, "bf16", "NVIDIA's H200 SXM data sheet"),
        _gpu("B200", 2250.0, "bf16", "NVIDIA's DGX B200 data sheet"),
    )
}
CPU = Processor(
    "CPU",
    0.08,
    "fp32",
    0.35,
    0.35,
    1.5,
    "one AVX2 core at 2.5 GHz; utilisation and backward measured with the toy's model, whose small "
    "tensors cost a forward pass almost what they cost a backward pass",
)


@dataclass(frozen=True)
class Speed:
    """Duration of one model's passes in one layout."""

    forward_flops: float  # forward FLOPs per token
    processes: int  # total number of processes
    flops_per_second: float  # FLOP/s that training reaches on one process
    backward: float  # time of a backward pass, in forward passes
    recomputed: float = 0.0  # share of a forward pass that a backward pass computes again
    pipeline: int = 1  # number of pipeline stages
    virtual_pipeline: int = 1  # model chunks per stage

    def training(self, tokens: float, num_micro_batches: float) -> float:
        """Returns the seconds of forward and backward passes over the tokens of all replicas."""
        passes = 1.0 + self.backward + self.recomputed
        return passes * self.forward(tokens, num_micro_batches)

    def forward(self, tokens: float, num_micro_batches: float) -> float:
        """Returns the seconds of forward passes alone."""
        ideal = 3.0 * self.forward_flops * tokens / (self.processes * self.flops_per_second)
        # the pipeline's bubble, while stages fill and drain
        waiting = (self.pipeline - 1) / (self.virtual_pipeline * max(1.0, num_micro_batches))
        return ideal / (1.0 + self.backward) * (1.0 + waiting)


def processor(config: Config, *, has_experts: bool) -> Processor:
    """Returns the processor of a recipe, with the recipe's overrides and its `utilisation`.

    Raises:
        ValueError: for a GPU or a precision without a profile, unless `plan` states the peak.
    """
    name, plan = config.cluster.gpu, section(config, Plan)
    if name is None:
        found = CPU
    elif name in PROCESSORS:
        found = PROCESSORS[name]
    elif plan.peak_tflops is None:
        raise ValueError(
            f"cluster.gpu={name!r} has no profile: expected one of {', '.join(PROCESSORS)}; or set "
            "plan.peak_tflops to what its data sheet says, without sparsity."
        )
    else:
        found = _gpu(name, plan.peak_tflops, config.model.precision, "plan.peak_tflops")
    if config.model.precision != found.precision and plan.peak_tflops is None:
        raise ValueError(
            f"The profile of {found.name} is for {found.precision}, and model.precision="
            f"{config.model.precision}: set plan.peak_tflops to its peak in that precision."
        )
    return replace(
        found,
        peak_tflops=plan.peak_tflops or found.peak_tflops,
        utilisation=plan.utilisation
        or (found.utilisation_experts if has_experts else found.utilisation),
        backward=plan.backward or found.backward,
    )
