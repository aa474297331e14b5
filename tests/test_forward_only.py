"""What a scoring pass inside a training step would break is refused, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(*, use_megatron_fsdp: bool = False, **settings: Any) -> str | None:
    """What is said of a real configuration with some settings changed."""
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    # isort: split
    from megatron.core.transformer import TransformerConfig

    from nemo_rod.megatron.forward_only import refuse_unsafe

    config = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=1)
    for name, value in settings.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    try:
        refuse_unsafe(config, SimpleNamespace(use_megatron_fsdp=use_megatron_fsdp))
    except ValueError as error:
        return str(error)
    return None


INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (INTERLEAVED, "virtual pipeline stages with these p2p settings: it trains on wrong grad"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local': it replays graphs"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "delayed FP8 scaling: it lets scoring move"),
        ({"moe_router_force_load_balancing": True}, "it scores with random routing; set moe_rou"),
        ({"fine_grained_activation_offloading": True}, "uses up its warm-up on the scoring pass"),
        ({"use_megatron_fsdp": True}, "Megatron FSDP: it is not supported yet"),
        ({"context_parallel_size": 2}, "context parallel: it splits the blocks it would score"),
    ],
)
def test_what_scoring_would_break_is_refused(settings: dict[str, Any], sentence: str) -> None:
    said = refusal(**settings)
    assert said is not None and said.startswith("Selection does not work with ")
    assert sentence in said


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**INTERLEAVED, "overlap_p2p_comm": True, "batch_p2p_comm": False},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    ],
)
def test_what_is_safe_is_not_refused(settings: dict[str, Any]) -> None:
    assert refusal(**settings) is None
