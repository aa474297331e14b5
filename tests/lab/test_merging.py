from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from nemo_rod import cli  # noqa: E402
from nemo_rod.lab.merging import merge_checkpoints  # noqa: E402

Tensors = dict[str, "torch.Tensor"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return {
        "model.embed_tokens.weight": draw(11, 4),
        "model.layers.0.mlp.weight": draw(4, 3),
        "model.layers.1.mlp.weight": draw(3, 4),
        "model.norm.weight": draw(4),
    }


def write(folder: Path, tensors: Tensors, *, shards: int = 1, config: dict | None = None) -> Path:
    folder.mkdir()
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            part = {name: tensors[name] for name in names if weight_map[name] == file}
            save_file(part, folder / file, {"format": "pt"})
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    return folder


def read(folder: Path) -> Tensors:
    loaded: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded.update(load_file(file))
    return loaded


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_the_ends_are_the_inputs_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, lam: float
) -> None:
    base, adapted = tensors_of(0, dtype), tensors_of(1, dtype)
    write(tmp_path / "base", base, shards=3)
    write(tmp_path / "adapted", adapted, shards=2)
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", lam)
    assert_equal(read(tmp_path / "out"), adapted if lam == 1.0 else base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lam", [0.2, 0.5, 0.8])
def test_between_the_ends_it_is_the_paper_formula(
    tmp_path: Path, dtype: torch.dtype, lam: float
) -> None:
    base, adapted = tensors_of(0, dtype), tensors_of(1, dtype)
    write(tmp_path / "base", base)
    write(tmp_path / "adapted", adapted, shards=2)
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", lam)
    merged = read(tmp_path / "out")
    for name in base:
        oracle = (1 - lam) * base[name].double() + lam * adapted[name].double()
        assert merged[name].dtype == dtype
        # One rounding to the stored dtype plus float32 working precision.
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        if dtype == torch.float64:
            eps = torch.finfo(dtype).eps
        assert torch.allclose(merged[name].double(), oracle, rtol=2 * eps, atol=2 * eps)


def test_what_did_not_change_stays_bit_equal_and_masks_survive(tmp_path: Path) -> None:
    base = tensors_of(0) | {"mask": torch.tensor([0.0, -torch.inf])}
    write(tmp_path / "base", base)
    write(tmp_path / "adapted", base)
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.3)
    assert_equal(read(tmp_path / "out"), base)


def test_other_dtypes_are_copied(tmp_path: Path) -> None:
    write(tmp_path / "base", {"w": torch.zeros(2), "ids": torch.tensor([1, 2])})
    write(tmp_path / "adapted", {"w": torch.ones(2), "ids": torch.tensor([1, 2])})
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.25)
    assert_equal(read(tmp_path / "out"), {"w": torch.full((2,), 0.25), "ids": torch.tensor([1, 2])})


def test_integers_that_differ_are_exact_at_the_ends_and_refused_between(tmp_path: Path) -> None:
    write(tmp_path / "base", {"packed": torch.tensor([1, 2])})
    write(tmp_path / "adapted", {"packed": torch.tensor([3, 4])})
    for lam, expected in ((0.0, [1, 2]), (1.0, [3, 4])):
        merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / str(lam), lam)
        assert read(tmp_path / str(lam))["packed"].tolist() == expected
    with pytest.raises(ValueError, match=r"packed.*differs"):
        merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.5)
    assert not (tmp_path / "out").exists()


def test_two_floating_dtypes_give_the_one_that_holds_both(tmp_path: Path) -> None:
    base, adapted = tensors_of(0, torch.bfloat16), tensors_of(1, torch.float32)
    write(tmp_path / "base", base)
    write(tmp_path / "adapted", adapted)
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 1.0)
    assert_equal(read(tmp_path / "out"), adapted)


@pytest.mark.parametrize("stored_in", ["base", "adapted"])
def test_a_tied_weight_that_only_one_side_stores_stays_tied(tmp_path: Path, stored_in: str) -> None:
    sides = {"base": tensors_of(0), "adapted": tensors_of(1)}
    sides[stored_in]["lm_head.weight"] = sides[stored_in]["model.embed_tokens.weight"].clone()
    for side, tensors in sides.items():
        write(tmp_path / side, tensors)
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.4)
    merged = read(tmp_path / "out")
    assert merged.keys() == sides["base"].keys()
    if stored_in == "base":
        assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_equal_vectors_are_not_taken_for_tied_weights(tmp_path: Path) -> None:
    """Norms of ones are equal by chance: the adapted model's own one is missing here."""
    write(tmp_path / "base", {"a.norm": torch.ones(4), "b.norm": torch.ones(4)})
    write(tmp_path / "adapted", {"a.norm": torch.full((4,), 3.0)})
    with pytest.raises(ValueError, match=r"b\.norm"):
        merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.5)


def test_output_shards_respect_the_limit_and_have_an_index(tmp_path: Path) -> None:
    base, adapted = tensors_of(0), tensors_of(1)
    write(tmp_path / "base", base)
    write(tmp_path / "adapted", adapted)
    out = tmp_path / "out"
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", out, 1.0, max_shard_bytes=200)
    assert_equal(read(out), adapted)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in adapted.values())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 and set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        part = load_file(file)
        assert sum(t.nbytes for t in part.values()) <= 200
        assert all(index["weight_map"][name] == file.name for name in part)
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


def test_configuration_is_copied_and_weights_or_manifests_are_not(tmp_path: Path) -> None:
    base = write(tmp_path / "base", tensors_of(0), shards=2, config={"model_type": "kept"})
    for name in ("tokenizer.json", "modeling_toy.py", "LICENSE", "manifest.json", "old.bin"):
        (base / name).write_text(name)
    write(tmp_path / "adapted", tensors_of(1))
    merge_checkpoints(base, tmp_path / "adapted", tmp_path / "out", 0.5)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "LICENSE", "config.json", "model.safetensors", "modeling_toy.py", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "kept"}
    modes = {
        (tmp_path / "out" / name).stat().st_mode for name in ("config.json", "model.safetensors")
    }
    assert len(modes) == 1  # safetensors writes files that a group cannot read


def test_transformers_loads_the_merge_of_two_tied_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    models = []
    for seed, name in enumerate(("base", "adapted")):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / name)
        models.append(model.state_dict())
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.25)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, torch.lerp(models[0][name], models[1][name], 0.25))


def test_an_interrupted_merge_is_begun_again(tmp_path: Path) -> None:
    write(tmp_path / "base", tensors_of(0))
    write(tmp_path / "adapted", tensors_of(1))
    left_over = tmp_path / ".out.partial"
    left_over.mkdir()
    (left_over / "model-00001-of-00009.safetensors").write_bytes(b"half")
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 1.0)
    assert_equal(read(tmp_path / "out"), tensors_of(1))
    assert not left_over.exists()


def change_missing(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def change_foreign(tensors: Tensors) -> None:
    tensors["model.extra.weight"] = torch.ones(2)


def change_shape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(5)


def change_kind(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(4, dtype=torch.int64)


def change_quantised(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(4).to(torch.float8_e4m3fn)


def change_to_adapter(tensors: Tensors) -> None:
    tensors["base_model.model.layers.0.mlp.lora_A.weight"] = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_missing, ["adapted lacks 1 tensor", "model.norm.weight"]),
        (change_foreign, ["base lacks 1 tensor", "model.extra.weight"]),
        (change_shape, ["model.norm.weight", "(5,)", "(4,)"]),
        (change_kind, ["model.norm.weight", "int64", "float32"]),
        (change_to_adapter, ["mlp.lora_A.weight", "low-rank factor"]),
        (change_quantised, ["model.norm.weight", "quantised"]),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(
    tmp_path: Path, change: object, words: list[str]
) -> None:
    write(tmp_path / "base", tensors_of(0))
    adapted = tensors_of(1)
    change(adapted)  # type: ignore[operator]
    write(tmp_path / "adapted", adapted)
    with pytest.raises(ValueError) as error:
        merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.5)
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "base", tensors_of(0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"lambda is 1\.5"):
        merge_checkpoints(tmp_path / "base", tmp_path / "base", tmp_path / "out", 1.5)
    with pytest.raises(ValueError, match="already holds files"):
        merge_checkpoints(tmp_path / "base", tmp_path / "base", tmp_path / "base", 0.5)
    with pytest.raises(ValueError, match="holds none"):
        merge_checkpoints(tmp_path / "base", tmp_path / "empty", tmp_path / "out", 0.5)
    write(tmp_path / "torn", tensors_of(0), shards=2)
    (tmp_path / "torn" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors"):
        merge_checkpoints(tmp_path / "base", tmp_path / "torn", tmp_path / "out", 0.5)
    (tmp_path / "torn" / "model-1.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=r"model-1\.safetensors is no whole safetensors file"):
        merge_checkpoints(tmp_path / "base", tmp_path / "torn", tmp_path / "out", 0.5)


def test_predictors_that_training_left_out_are_not_merged(tmp_path: Path) -> None:
    one, other = tensors_of(1), tensors_of(2)
    base = write(tmp_path / "base", {**one, "mtp.fc.weight": torch.ones(2, 2)})
    adapted = write(tmp_path / "adapted", other)
    merge_checkpoints(base, adapted, tmp_path / "merged", 0.5)
    expected = {name: torch.lerp(one[name], other[name], 0.5) for name in one}
    assert_equal(read(tmp_path / "merged"), expected)
    # both have them: they are merged like all others
    both = write(tmp_path / "both", {**other, "mtp.fc.weight": torch.zeros(2, 2)})
    merge_checkpoints(base, both, tmp_path / "whole", 0.5)
    assert_equal(read(tmp_path / "whole"), {**expected, "mtp.fc.weight": torch.full((2, 2), 0.5)})


@pytest.mark.parametrize(
    "file", ["latest_checkpointed_iteration.txt", ".metadata", "iter_0000004/.metadata"]
)
@pytest.mark.parametrize("side", ["base", "adapted"])
def test_a_checkpoint_of_megatron_is_to_be_exported_first(
    tmp_path: Path, side: str, file: str
) -> None:
    for folder in ("base", "adapted"):
        write(tmp_path / folder, tensors_of(0))
    (tmp_path / side / file).parent.mkdir(exist_ok=True)
    (tmp_path / side / file).write_text("4")
    with pytest.raises(ValueError, match=rf"{side} is a .* Megatron.s .*nemo-rod export"):
        merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "out", 0.5)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def nemo_rod(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["nemo-rod", *arguments])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    out = str(tmp_path / "out")
    sides = [tensors_of(0), tensors_of(1)]
    folders = [
        *(str(write(tmp_path / n, t)) for n, t in zip(("base", "adapted"), sides, strict=True)),
        out,
    ]
    assert nemo_rod("merge", *folders, "lambda=0.25") == 0
    expected = {name: torch.lerp(tensor, sides[1][name], 0.25) for name, tensor in sides[0].items()}
    assert_equal(read(tmp_path / "out"), expected)
    assert capsys.readouterr().out.startswith(f"{out}: 0.75 of {folders[0]} and 0.25 of ")
    for arguments, sentence in (
        (["merge", *folders, "lambda=0.25"], "already holds files"),
        (["merge", *folders, "lambda=half"], "lambda=half is not valid"),
        (["merge", *folders], "expected nemo-rod merge BASE ADAPTED OUT lambda=WEIGHT"),
        (["merge", *folders[:2], "lambda=0.5"], "expected nemo-rod merge BASE ADAPTED OUT"),
        (["merge", *folders[:2], str(tmp_path / "new"), "lambda=2"], "lambda is 2.0"),
    ):
        assert nemo_rod(*arguments) == 2
        assert sentence in capsys.readouterr().err
