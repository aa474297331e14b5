"""`python -m nemo_rod.lab.delta_net_probe`: kernels of Gated DeltaNet at the shape of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nemo_rod.megatron.delta_net import INSTALL, fault


def probe(rule: Callable[..., Any], size: tuple[int, int, int, int], device: str) -> str:
    """Calls the kernels forward and backward as a layer does.

    `rule` is `chunk_gated_delta_rule` of flash-linear-attention, or a function like it; `size` are
    blocks, tokens, heads, and the width of a head.

    Raises:
        ValueError: two equal calls differ, or a value or gradient is not finite.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k, v = (draw(*size) for _ in range(3))
    beta, decay = draw(*size[:3]).sigmoid(), -draw(*size[:3]).float().exp() / 16
    given = [each.requires_grad_() for each in (q, k, v, decay, beta)]

    def call() -> torch.Tensor:
        q, k, v, decay, beta = given
        return rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    call()  # kernels are chosen in the first call
    outputs = [call() for _ in range(2)]
    outputs[1].float().square().mean().backward()
    gradients = [each.grad for each in given]
    shape = " x ".join(map(str, size))
    if not outputs[0].equal(outputs[1]):
        raise ValueError(f"Gated DeltaNet at {shape}: two equal calls differ; {INSTALL}.")
    if not all(each is not None and each.isfinite().all() for each in [*outputs, *gradients]):
        raise ValueError(f"Gated DeltaNet at {shape}: values are not finite; {INSTALL}.")
    return f"Gated DeltaNet at {shape}: finite, equal calls are equal"


def probe_here() -> str:
    """Calls the installed kernels at the shape of Qwen3.5's layers, for 1 block and for 8.

    Raises:
        ValueError: the kernels are at fault on this GPU, as known or as measured.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    if (problem := fault(torch.cuda.get_device_capability)) is not None:
        raise ValueError(problem)
    probes = [probe(chunk_gated_delta_rule, (b, 4096, 32, 128), "cuda") for b in (1, 8)]
    return probes[-1]


if __name__ == "__main__":
    print(probe_here())
