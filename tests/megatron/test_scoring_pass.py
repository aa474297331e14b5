"""A pass that scores reads what it should, and puts back what it changed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import WORKERS
from tiny import Torchrun

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_share_positions_out_and_put_them_back(size: int) -> None:
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    # isort: split
    from nemo_rod.megatron.scoring.scoring_pass import at_their_places, own_positions

    whole = torch.arange(1, 1 + 2 * 16).view(2, 16)
    back = torch.zeros_like(whole)
    for rank in range(size):
        group: Any = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        own = own_positions(whole, group)
        assert own.shape == (2, 16 // size)
        placed = at_their_places(own, group)
        assert not (back * placed).any()  # no position has two ranks
        back += placed
    assert torch.equal(back, whole)


def test_frozen_submodules_stay_in_evaluation_mode() -> None:
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    # isort: split
    from megatron.core.transformer import TransformerConfig

    from nemo_rod.megatron.scoring.forward_only import forward_only

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    trained, frozen = torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout())
    chunk = torch.nn.ModuleList([trained, frozen])
    frozen.eval()
    with forward_only([chunk], config):
        assert not any(module.training for module in chunk.modules())
    assert chunk.training and trained.training
    assert not frozen.training and not frozen[0].training


def test_scoring_does_not_run_heads_for_later_tokens(torchrun: Torchrun) -> None:
    (said,) = torchrun(1, WORKERS / "multi_token_worker.py", timeout=120)
    found = json.loads(next(line for line in said.splitlines() if line[:1] == "{"))
    assert found["same"]
    assert found["scoring"] == {"output layer": 2, "head": 0}  # two micro-batches
    assert found["training"] == {"output layer": 2, "head": 1}  # one, with both heads
    assert found["refused"] == (
        "The model would also be trained by multi-token prediction in the model, which is not part "
        "of the loss that selection and its references use: set mtp_num_layers=null."
    )
