"""A base is made under the published names, and checked against the blocks that it is to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus_cases import BYTE, run, source, texts, write

from nemo_rod.recipe.base_model import check_tokenizer, initialise_base


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    run(tmp_path / "blocks", [source("web", [write(tmp_path / "web.jsonl", texts(50, 1))]),
                              source("new", [write(tmp_path / "new.jsonl", texts(50, 2))],
                                     role="adaptation")])  # fmt: skip
    return tmp_path / "blocks"


def checkpoint(folder: Path, vocab_size: int, *, multimodal: bool) -> Path:
    config = pytest.importorskip("transformers").AutoConfig
    if multimodal:  # as Qwen3.5's: the vocabulary is a matter of its text part
        described = config.for_model("qwen3_vl", text_config={"vocab_size": vocab_size})
    else:
        described = config.for_model("qwen3", vocab_size=vocab_size)
    described.save_pretrained(folder)
    BYTE.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_vocabulary_has_to_hold_the_tokenizers(
    multimodal: bool, blocks: Path, tmp_path: Path
) -> None:
    check_tokenizer(checkpoint(tmp_path / "fits", 256, multimodal=multimodal), blocks)
    with pytest.raises(ValueError, match=r"knows 200 tokens, but the tokenizer of .* has 256"):
        check_tokenizer(checkpoint(tmp_path / "small", 200, multimodal=multimodal), blocks)


def test_a_new_base_has_the_published_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Nemotron-H")
    from architectures import NEMOTRON, tensors

    architecture = {**NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}
    initialise_base(architecture, tmp_path / "base", tokenizer="byte", seed=0)
    stored = tensors(tmp_path / "base")
    assert "backbone.embedding.weight" not in stored
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    embeddings = loaded.get_input_embeddings().weight
    assert (embeddings == stored["backbone.embeddings.weight"]).all()
    # what writes to the residual stream starts smaller: by the root of two sums a layer
    spread = {name: float(weight.std()) for name, weight in stored.items() if weight.dim() == 2}
    for name, residual in (("1.mixer.down_proj", True), ("1.mixer.up_proj", False)):
        expected = 0.02 * (8**-0.5 if residual else 1)
        assert spread[f"backbone.layers.{name}.weight"] == pytest.approx(expected, rel=0.1)
