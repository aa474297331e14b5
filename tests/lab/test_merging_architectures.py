"""Tiny random checkpoints of the paper's architectures merge exactly and load again.

The installed transformers decides which are tested: Qwen3.5 and Nemotron-H where it has them, else
their nearest kin: Qwen3-Next (Gated DeltaNet with attention) and Bamba (Mamba-2 with attention).
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from architectures import tensors  # noqa: E402

from nemo_rod.lab.merging import merge_checkpoints  # noqa: E402
from nemo_rod.published import save_published  # noqa: E402

RENAMED = ("embedding", "embeddings")  # as transformers 5 writes it, and as it is published
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
HYBRID = {
    "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
    "n_groups": 2,
}  # fmt: skip
# family -> candidates, the first that is installed counts: (config, model, sizes of its own)
FAMILIES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "Qwen3.5": [("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA_NET),
                ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA_NET, **EXPERTS})],
    "Nemotron-H": [("NemotronHConfig", "NemotronHForCausalLM", HYBRID),
                   ("BambaConfig", "BambaForCausalLM", MAMBA)],
}  # fmt: skip


def model_of(family: str, seed: int, tied: bool) -> Any:
    for config_name, model_name, own in FAMILIES[family]:
        if hasattr(transformers, model_name):
            config = getattr(transformers, config_name)(**SIZES, **own, tie_word_embeddings=tied)
            torch.manual_seed(seed)
            return getattr(transformers, model_name)(config).to(torch.bfloat16)
    pytest.skip(f"transformers {transformers.__version__} has no kin of {family}")


def is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_merges_are_exact_and_load(family: str, tied: bool, tmp_path: Path) -> None:
    models = [model_of(family, seed, tied) for seed in (0, 1)]
    for model, name, shard in zip(models, ("base", "adapted"), ("4KB", "9KB"), strict=True):
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
    base, adapted = (model.state_dict() for model in models)
    ids = torch.arange(12).reshape(1, 12)
    for lam in (0.0, 0.3, 1.0):
        out = tmp_path / f"merged_{lam}"
        merge_checkpoints(
            tmp_path / "base", tmp_path / "adapted", out, lam, max_shard_bytes=6 * 1024
        )
        loaded = type(models[0]).from_pretrained(out, torch_dtype=torch.bfloat16)
        assert loaded.state_dict().keys() == base.keys()
        assert is_tied(loaded) == is_tied(models[0])
        for name, tensor in loaded.state_dict().items():
            wide = torch.lerp(base[name].float(), adapted[name].float(), lam)
            assert torch.equal(tensor, wide.to(tensor.dtype)), name
        with torch.no_grad():
            assert torch.isfinite(loaded(input_ids=ids).logits).all()


def test_sides_of_different_writers_merge_under_the_published_names(tmp_path: Path) -> None:
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Nemotron-H")
    model = model_of("Nemotron-H", 0, False)
    model.save_pretrained(tmp_path / "base")
    save_published(model, tmp_path / "adapted")
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "merged", 0.3)
    base, adapted, merged = (tensors(tmp_path / side) for side in ("base", "adapted", "merged"))
    assert base.keys() ^ adapted.keys() == {f"backbone.{n}.weight" for n in RENAMED}
    assert merged.keys() == adapted.keys()
    assert all(torch.equal(merged[name], adapted[name]) for name in merged)
