"""A base is made under the published names, and checked against the blocks that it is to read."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, run, source, texts, write

from nemo_rod.config import Domain, Model
from nemo_rod.corpus import load_tokenizer
from nemo_rod.hosts.nemo_rl.settings import refuse_own_code
from nemo_rod.run.base_model import (
    check_base,
    check_tokenizer,
    checkpoint_digest,
    commit_of,
    initialise_base,
    resolve_base,
)
from nemo_rod.run.run_folder import RunFolder

RECIPE = (Model(), Domain())


@pytest.fixture
def blocks(tmp_path):
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
def test_a_vocabulary_holds_the_tokenizers(multimodal, blocks, tmp_path):
    check_tokenizer(checkpoint(tmp_path / "fits", 256, multimodal=multimodal), blocks, *RECIPE)
    with pytest.raises(ValueError, match=r"knows 200 tokens, but the tokenizer of .* has 256"):
        check_tokenizer(checkpoint(tmp_path / "small", 200, multimodal=multimodal), blocks, *RECIPE)


def with_code(folder: Path, ran: Path) -> Path:
    """A checkpoint of a model type that transformers lacks, with its class beside it."""
    folder.mkdir()
    BYTE.save_pretrained(folder)
    described = {
        "model_type": "mine", "vocab_size": 256, "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mine.Mine"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "configuration_mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PretrainedConfig\n"
        f"Path({str(ran)!r}).touch()\n"
        "class Mine(PretrainedConfig):\n"
        "    model_type = 'mine'\n"
    )
    return folder


def test_code_beside_a_checkpoint_runs_only_when_asked_for(blocks, tmp_path):
    pytest.importorskip("transformers")
    base, ran = with_code(tmp_path / "base", tmp_path / "ran"), tmp_path / "ran"
    with pytest.raises(ValueError) as refusal:
        check_tokenizer(base, blocks, *RECIPE)
    assert "comes with code of its own" in str(refusal.value)
    assert "set model.trust_remote_code=true" in str(refusal.value)
    with pytest.raises(ValueError, match=r"NeMo-RL would run: .* model\.trust_remote_code"):
        refuse_own_code(str(base))
    assert not ran.exists()
    check_tokenizer(base, blocks, Model(trust_remote_code=True), Domain())
    assert ran.exists()
    refuse_own_code(str(checkpoint(tmp_path / "plain", 256, multimodal=False)))


@pytest.mark.parametrize("name", ["model.embed_tokens", "backbone.embeddings"])
def test_an_end_that_the_base_never_met_is_said(name, blocks, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    base = checkpoint(tmp_path / "base", 256, multimodal=False)
    rows = torch.ones(256, 4)
    tensors = {"a.weight": torch.zeros(256, 4), f"{name}.weight": rows}
    save_file(tensors, base / "model.safetensors")
    model, domain = Model(hf=str(base)), Domain(tokenizer="byte")
    check_base(base, blocks, model, domain)
    assert capsys.readouterr().err == ""
    rows[0] = 0  # the byte tokenizer's EOD
    save_file(tensors, base / "model.safetensors")
    check_base(base, blocks, model, domain)
    warning = capsys.readouterr().err
    assert f"the embedding of token 0, which ends documents, is zero in {name}.weight of" in warning
    assert "set domain.eod" in warning


FETCH = "fetch or copy the whole checkpoint again"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda one, _: one.unlink(), rf"model-1\.safetensors is missing: {FETCH}"),
        (lambda one, _: one.write_text("version https"), rf"1\.safetensors is damaged .*: {FETCH}"),
        (
            lambda one, _: one.write_text(LFS),
            r"1\.safetensors is not the data, but a pointer of Git",
        ),
        (lambda _, index: index.write_text("{}"), rf"json is damaged .*'weight_map'.*: {FETCH}"),
    ],
)
def test_a_base_without_all_its_weights_is_refused(change, sentence, blocks, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    base, names = checkpoint(tmp_path / "base", 256, multimodal=False), ("a", "b")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(names)}
    for name, file in files.items():
        save_file({name: torch.ones(2)}, base / file)
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    (base / "._model.safetensors").write_text("of macOS")
    options = (blocks, Model(hf=str(base)), Domain(tokenizer="byte"))
    check_base(base, *options)
    change(base / "model-1.safetensors", index)
    with pytest.raises(ValueError, match=sentence):
        check_base(base, *options)
    save_file({"a": torch.ones(2)}, base / "model.safetensors")  # read before the index
    (base / "model-1.safetensors").unlink(missing_ok=True)
    check_base(base, *options)
    index.unlink()
    with pytest.raises(ValueError, match=r"model-0\.safetensors repeats tensors .*: move it out"):
        check_base(base, *options)


def test_a_base_whose_weights_were_replaced_is_refused(tmp_path):
    """It is a link to a folder of the user's; what is as old as the run is not read again."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    run, own = RunFolder(tmp_path / "run", "toy"), tmp_path / "own"
    own.mkdir()
    run.base.mkdir(parents=True)
    weights = own / "model.safetensors"
    save_file({"a": np.ones(2)}, weights)
    resolve_base(str(own), run.base / "hf")
    manifest = run.base / "manifest.json"
    manifest.write_text(json.dumps({"outputs": {"weights": checkpoint_digest(own)}}))
    for value in (1, 2):
        save_file({"a": np.full(2, float(value))}, own / "new")
        (own / "new").rename(weights)
        os.utime(manifest, (0, 0))
        refused = pytest.raises(ValueError, match=r"own: its weights changed since .*base was ma")
        with nullcontext() if value == 1 else refused:
            assert run.checkpoint("base") == run.base / "hf"


def test_a_new_base_has_the_published_names(tmp_path):
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


def test_a_base_of_the_hub_may_be_pinned_and_its_commit_is_known(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name: str, revision: str | None = None) -> str:
        asked.append((name, revision))
        folder = tmp_path / "cache" / "snapshots" / ("c" * 40)
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve_base("org/model", tmp_path / "latest")
    resolve_base("org/model@v1", tmp_path / "pinned")
    assert asked == [("org/model", None), ("org/model", "v1")]
    assert commit_of(tmp_path / "pinned") == "c" * 40
    (tmp_path / "a@b").mkdir()
    resolve_base(str(tmp_path / "a@b"), tmp_path / "own")
    monkeypatch.setenv("HOME", str(tmp_path))
    resolve_base("~/a@b", tmp_path / "own")
    assert commit_of(tmp_path / "own") is None and len(asked) == 2


def test_a_tokenizer_of_the_hub_may_be_pinned(monkeypatch):
    auto = pytest.importorskip("transformers").AutoTokenizer

    def from_pretrained(name: str, **options: Any) -> None:
        raise OSError(f"{name} {options['revision']}")

    monkeypatch.setattr(auto, "from_pretrained", from_pretrained)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"org/model v1"):
        load_tokenizer("org/model@v1")
