"""Exports that lack a tensor are refused; predictors that are not trained may be left out.

`make test-architectures` and `make test-nemo-rl-worker` show on real models which tensors the
versions of Megatron-Bridge leave out.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from nemo_rod.checkpoints.published import copy_beside
from nemo_rod.files import read_json, write_json

pytestmark = pytest.mark.usefixtures("megatron")

HEAD, EMBEDDING, LAST = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.weight"
KEPT = (
    *("tokenizer.json", "tokenizer.model.v3", "vocab.bpe", "chat_template.jinja", "LICENSE.txt"),
    *("MODEL_LICENCE", "Tongyi Qianwen LICENSE AGREEMENT", "THIRD_PARTY_NOTICES.txt", "COPYING"),
    *("COPYRIGHT", "PATENTS", "TERMS_OF_USE.md", "USAGE_POLICY.md", "EULA.txt"),
    *("modeling_own.py", "layers.py", "__init__.py"),
)
# of the base; what is kept, and with fp32 weights the type that the configuration names
BESIDE = {
    "config.json": b'{"rope_theta":1e4,\n  "torch_dtype":  "bfloat16"}',
    **dict.fromkeys(KEPT, b"\xc3\xa9\r\n{{ x }}"),
    "model.safetensors": b"other weights", "model.safetensors.index.json": b"{}",
    "README.md": b"its card", "manifest.json": b"{}", "consolidated.pth": b"more weights",
}  # fmt: skip
PREDICTOR, AFTER_LAST = "mtp.fc.weight", "model.layers.2.mlp.weight"


def save(
    folder: Path, written: dict[str, list[str]], *, tied: bool = False, trusts: bool = False,
    linked: bool = False,
) -> None:  # fmt: skip
    """Exports a model of two layers by a bridge that writes these tensors, by file."""
    from nemo_rod.megatron.gaps import save_hf

    def write(model: list, path: Path, *, show_progress: bool, strict: bool) -> None:
        assert not strict
        path.mkdir()
        for file, names in written.items():
            safetensors.torch.save_file({name: torch.zeros(1) for name in names}, path / file)
        index = {name: "model-1.safetensors" for name in names_of_source}
        write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})

    names_of_source = [HEAD, EMBEDDING, LAST, PREDICTOR, AFTER_LAST]
    source = SimpleNamespace(get_all_keys=lambda: names_of_source)
    bridge: Any = SimpleNamespace(
        save_hf_weights=write,
        hf_pretrained=SimpleNamespace(
            state=SimpleNamespace(source=source),
            model_name_or_path=folder.parent / "base",
            trust_remote_code=trusts,
        ),
    )
    config = SimpleNamespace(num_layers=2, share_embeddings_and_output_weights=tied)
    (folder.parent / "base").mkdir()
    for name, content in BESIDE.items():
        (folder.parent / "base" / name).write_bytes(content)
    if linked:
        real = (folder.parent / "base").rename(folder.parent / "real")
        shutil.copytree(real, folder.parent / "base", copy_function=os.symlink)
    save_hf(bridge, [SimpleNamespace(config=config)], folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("trusts", "linked"), [(False, False), (True, False), (True, True)])
def test_an_export_without_predictors_is_whole_and_so_is_its_index(tmp_path, trusts, linked):
    written = {"model-1.safetensors": [HEAD, EMBEDDING], "model-2.safetensors": [LAST]}
    save(tmp_path / "hf", written, trusts=trusts, linked=linked)
    index = read_json(tmp_path / "hf" / "model.safetensors.index.json")
    assert index["weight_map"] == {n: file for file, names in written.items() for n in names}
    for file in written:
        with safe_open(tmp_path / "hf" / file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
    beside = {f.name: f.read_bytes() for f in (tmp_path / "hf").iterdir() if f.name in BESIDE}
    kept = {name: BESIDE[name] for name in KEPT if trusts or not name.endswith(".py")}
    config = BESIDE["config.json"].replace(b"bfloat16", b"float32")
    del beside["model.safetensors.index.json"]
    assert beside == {**kept, "config.json": config}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (b'{"dtype": "torch.bfloat16"}', b'{"dtype": "float32"}'),
        (b'{"dtype":"float64",\r\n "a":"\xe9"}', b'{"dtype":"float32",\r\n "a":"\xe9"}'),
        (b'{"dtype": "half"}', b'{"dtype": "float32"}'),
        (b'{"text": {"torch_dtype": "float16"}}', b'{"text": {"torch_dtype": "float32"}}'),
        *[(same, same) for same in (b'{"dtype": "auto"}', b'{"dtype": null}', b'{"x_dtype": "a"}')],
    ],
)  # fmt: skip
def test_the_configuration_names_the_type_of_the_weights(config, expected, tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    base.mkdir()
    made.mkdir()
    (base / "config.json").write_bytes(config)
    safetensors.torch.save_file({"a": torch.zeros(2)}, made / "model.safetensors")
    copy_beside(base, made)
    assert (made / "config.json").read_bytes() == expected


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("written", "tied", "lost"),
    [([HEAD, EMBEDDING], False, LAST), ([EMBEDDING, LAST], False, HEAD), ([LAST], True, EMBEDDING)],
)
def test_an_export_that_lacks_a_tensor_is_refused(written, tied, lost, tmp_path):
    sentence = rf"The export to {tmp_path / 'hf'} lacks 1 tensor\(s\) of the model \({lost}\)"
    with pytest.raises(ValueError, match=sentence):
        save(tmp_path / "hf", {"model-1.safetensors": written}, tied=tied)


def test_models_that_others_load_get_no_head_for_further_tokens():
    import transformers
    from megatron.bridge import AutoBridge

    from nemo_rod.hosts.nemo_rl.worker import whole_loads

    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip("this transformers has no Nemotron-H of its own")
    _, _, values = architectures.ARCHITECTURES["nemotron_3_nano"]
    config = transformers.NemotronHConfig(**values, architectures=["NemotronHForCausalLM"])
    bridge = AutoBridge.from_hf_config(config)
    with_head = bridge.to_megatron_provider(load_weights=False)
    assert (with_head.mtp_num_layers, with_head.mtp_hybrid_override_pattern) == (1, "*E")
    with whole_loads():
        provider = bridge.to_megatron_provider(load_weights=False)
    assert (provider.mtp_num_layers, provider.mtp_hybrid_override_pattern) == (None, None)
