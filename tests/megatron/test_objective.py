"""What else than the loss of the next token a model would be trained by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_indexer_of_sparse_attention_is_refused() -> None:
    """Built by name: Megatron's own sparse attention needs kernels of a GPU."""
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    # isort: split
    from nemo_rod.megatron import objective

    def chunk(**parts: torch.nn.Module) -> Any:
        attention: Any = torch.nn.Module()
        attention.config = SimpleNamespace(mtp_num_layers=None)
        for name, part in parts.items():
            setattr(attention, name, part)
        attention.skipped = None
        return torch.nn.ModuleDict({"core_attention": attention})

    objective._refuse([chunk()])
    with pytest.raises(ValueError, match=r"the sparse attention's indexer in core_attention, .*:"):
        objective._refuse([chunk(indexer=torch.nn.Linear(2, 2))])


def test_megatrons_sparse_attention_calls_its_indexer_so() -> None:
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    # isort: split
    name = "megatron.core.transformer.experimental_attention_variant.dsa"
    attention = pytest.importorskip(name).DSAttention
    assert "indexer" in attention.__init__.__code__.co_names
