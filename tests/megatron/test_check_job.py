"""What a model would train besides the language model, as Megatron-Bridge itself sets it up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import composed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.bridge")
if not hasattr(transformers, "Qwen3_5TextConfig"):
    pytest.skip("this transformers has no Qwen3.5 and no Nemotron-H", allow_module_level=True)

from nemo_rod.commands.rehearse import small_model  # noqa: E402
from nemo_rod.megatron.check_job import refuse_other_losses  # noqa: E402
from nemo_rod.rehearsal.small_checkpoint import write_checkpoint  # noqa: E402


def bridges_own_provider(recipe: str, folder: Path) -> Any:
    """The provider of a recipe's model in small, with nothing of ours set."""
    from megatron.bridge import AutoBridge

    from nemo_rod.megatron.cpu import trainers

    trainers.install_megatron_bridge()
    small = small_model(composed(f"recipe={recipe}"))
    assert small is not None
    write_checkpoint(small, folder, precision="bf16")
    return AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)


def test_a_head_for_further_tokens_is_refused(tmp_path: Path) -> None:
    provider = bridges_own_provider("german_qwen3_5_4b", tmp_path)
    with pytest.raises(ValueError, match="has mtp_num_layers=1: a head for further tokens would"):
        refuse_other_losses(provider, "the model")
    provider.mtp_num_layers = None
    refuse_other_losses(provider, "the model")


def test_a_balancing_loss_of_routers_is_refused(tmp_path: Path) -> None:
    provider = bridges_own_provider("german_nemotron_3_nano_30b_a3b", tmp_path)
    with pytest.raises(ValueError) as refused:
        refuse_other_losses(provider, "the model")
    assert "moe_aux_loss_coeff=0.0001" in str(refused.value)
    assert "trained by a balancing loss beside the language-modelling loss" in str(refused.value)
    provider.moe_router_load_balancing_type = "none"
    refuse_other_losses(provider, "the model")
    provider.moe_z_loss_coeff = 1e-3
    with pytest.raises(ValueError, match=r"moe_z_loss_coeff=0\.001"):
        refuse_other_losses(provider, "the model")


def test_dense_models_have_no_routers() -> None:
    refuse_other_losses(
        SimpleNamespace(
            mtp_num_layers=None,
            num_moe_experts=None,
            moe_aux_loss_coeff=0.01,
            moe_router_load_balancing_type="aux_loss",
        ),
        "the model",
    )
