"""FLOPs -> seconds: the peak of a processor, the share of it that training reaches, and waiting.

Every number here is an assumption with its source, and a key of `plan` replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rod.config import Config


@dataclass(frozen=True)
class Processor:
    """What one process computes on.

    Attributes:
        name: as `cluster.gpu` has it.
        peak_tflops: of matrix products in `precision`, without sparsity.
        precision: "bf16" or "fp32".
        utilisation: share of the peak that training reaches, all layers dense.
        utilisation_experts: the same, with routed experts.
        backward: time of a backward pass, in forward passes.
        source: where the numbers come from.
    """

    name: str
    peak_tflops: float
    precision: str
    utilisation: float
    utilisation_experts: float
    backward: float
    source: str


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
    """Seconds of passes of one model in one layout.

    Attributes:
        forward_flops: of one token.
        processes: in all.
        flops_per_second: that training reaches on one process.
        backward: time of a backward pass, in forward passes.
        pipeline: stages.
        virtual_pipeline: chunks of each stage.
    """

    forward_flops: float
    processes: int
    flops_per_second: float
    backward: float
    pipeline: int = 1
    virtual_pipeline: int = 1

    def training(self, tokens: float, num_micro_batches: float) -> float:
        """Seconds of forward and backward passes.

        Args:
            tokens: of one step, over all replicas.
            num_micro_batches: of one replica and step.
        """
        ideal = 3.0 * self.forward_flops * tokens / (self.processes * self.flops_per_second)
        return ideal * self._waiting(num_micro_batches)

    def forward(self, tokens: float, num_micro_batches: float) -> float:
        """Seconds of forward passes alone."""
        return self.training(tokens, num_micro_batches) / (1.0 + self.backward)

    def _waiting(self, num_micro_batches: float) -> float:
        """Stages of a pipeline wait for the first micro-batch to come and the last to leave."""
        return 1.0 + (self.pipeline - 1) / (self.virtual_pipeline * max(1.0, num_micro_batches))


def processor(config: Config, *, has_experts: bool) -> tuple[Processor, float, float, float]:
    """The processor of a recipe, and what of it the recipe replaces.

    Returns:
        Its profile; peak TFLOP/s, utilisation and backward as they are used.

    Raises:
        ValueError: for a GPU or a precision without a profile, when `plan` does not say either.
    """
    name, plan = config.cluster.gpu, config.plan
    for key in ("peak_tflops", "utilisation", "backward"):
        value = getattr(plan, key)
        if value is not None and not value > 0:
            raise ValueError(f"plan.{key}={value!r} is not valid: expected > 0, or null.")
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
    usual = found.utilisation_experts if has_experts else found.utilisation
    peak = found.peak_tflops if plan.peak_tflops is None else plan.peak_tflops
    reached = usual if plan.utilisation is None else plan.utilisation
    backward = found.backward if plan.backward is None else plan.backward
    return found, peak, reached, backward
