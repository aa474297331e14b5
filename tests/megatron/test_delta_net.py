"""Kernels of Gated DeltaNet: known faults are refused, and a probe finds others."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import Later

delta_net = Later("nemo_rod.megatron.delta_net")
delta_net_probe = Later("nemo_rod.lab.delta_net_probe")
SIZE = (2, 128, 2, 16)


def rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """Megatron's own in torch, without the kernel that normalises queries and keys."""
    from megatron.core.ssm import gated_delta_net

    q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    return gated_delta_net.common.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [
        *(("0.4.2", (10, 0), True), ("0.5.2", (12, 0), True), ("0.6.0", (10, 0), False)),
        *(("0.4.2", (9, 0), False), ("0.4.2", None, False), (None, (10, 0), False)),
    ],
)
def test_versions_with_known_faults_are_refused_on_blackwell(
    version, capability, refused, monkeypatch
):
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    delta_net.refuse_faulty_kernels(SimpleNamespace(experimental_attention_variant=None))
    provider = SimpleNamespace(experimental_attention_variant="gated_delta_net")
    if not refused:
        delta_net.refuse_faulty_kernels(provider)
        return
    with pytest.raises(ValueError, match=r"expected 0\.6\.0 or newer: pip install --no-deps fla"):
        delta_net.refuse_faulty_kernels(provider)


def test_the_probe_finds_gradients_that_are_nan_and_calls_that_differ():
    from megatron.core.ssm import gated_delta_net

    if not hasattr(gated_delta_net, "common"):
        pytest.skip("this Megatron-core has its rule in another place")
    assert "2 x 128 x 2 x 16: finite" in delta_net_probe.probe(rule, SIZE, "cpu")
    calls = iter(range(99))

    def differs(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return rule(*arguments, **options)[0] + next(calls), None

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * torch.nan

    def poisons(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return Poisoned.apply(rule(*arguments, **options)[0]), None

    with pytest.raises(ValueError, match="two equal calls differ"):
        delta_net_probe.probe(differs, SIZE, "cpu")
    with pytest.raises(ValueError, match="values are not finite"):
        delta_net_probe.probe(poisons, SIZE, "cpu")
