"""Small random checkpoints of the paper's architectures merge exactly and load again.

The installed transformers decides which are tested. SmolLM2's output layer is tied.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from architectures import make, tensors  # noqa: E402

from nemo_rod.checkpoints.published import save_published  # noqa: E402
from nemo_rod.lab.merging import merge_checkpoints  # noqa: E402

RENAMED = ("embedding", "embeddings")  # as transformers 5 writes it, and as it is published


def model_of(name: str) -> Any:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return make(name).to(torch.bfloat16)


def is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "nemotron_h", "llama"])
def test_merges_are_exact_and_load(name, tmp_path):
    models = [model_of(name) for _ in range(2)]
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in models[1].parameters():
            weight += 0.1 * torch.randn_like(weight)
    for model, side, shard in zip(models, ("base", "adapted"), ("9KB", "20KB"), strict=True):
        model.save_pretrained(tmp_path / side, max_shard_size=shard)
    base, adapted = (model.state_dict() for model in models)
    ids = torch.arange(12).reshape(1, 12)
    for lam in (0.0, 0.3, 1.0):
        out = tmp_path / f"merged_{lam}"
        merge_checkpoints(
            tmp_path / "base", tmp_path / "adapted", out, lam, max_shard_bytes=12 * 1024
        )
        assert len(list(out.glob("*.safetensors"))) > 1
        loaded = type(models[0]).from_pretrained(out, torch_dtype=torch.bfloat16)
        assert loaded.state_dict().keys() == base.keys()
        assert is_tied(loaded) == is_tied(models[0]) == (name == "llama")
        for key, tensor in loaded.state_dict().items():
            wide = torch.lerp(base[key].float(), adapted[key].float(), lam)
            assert torch.equal(tensor, wide.to(tensor.dtype)), key
        with torch.no_grad():
            assert torch.isfinite(loaded(input_ids=ids).logits).all()


def test_sides_of_different_writers_merge_under_the_published_names(tmp_path):
    model = model_of("nemotron_h")
    model.save_pretrained(tmp_path / "base")
    save_published(model, tmp_path / "adapted")
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "merged", 0.3)
    base, adapted, merged = (tensors(tmp_path / side) for side in ("base", "adapted", "merged"))
    assert base.keys() ^ adapted.keys() == {f"backbone.{n}.weight" for n in RENAMED}
    assert merged.keys() == adapted.keys()
    assert all(torch.equal(merged[name], adapted[name]) for name in merged)
