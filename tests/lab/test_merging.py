import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import nemo_rod
from mishaps import largest_file

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from nemo_rod.lab.merging import merge_checkpoints  # noqa: E402

Tensors = dict[str, "torch.Tensor"]
NORM = "model.norm.weight"
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
    folder.mkdir(parents=True)
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


def merged(folder: Path, base: Tensors, adapted: Tensors, lam: float, **options: Any) -> Tensors:
    """Writes two checkpoints, each if it is not there yet, and returns their merge."""
    for name, tensors, shards in (("base", base, 3), ("adapted", adapted, 2)):
        if not (folder / name).exists():
            write(folder / name, tensors, shards=min(shards, len(tensors)))
    out = folder / f"merged_{lam}"
    merge_checkpoints(folder / "base", folder / "adapted", out, lam, **options)
    return read(out)


def merge_or_refuse(folder: Path, refusal: str | None) -> None:
    """Merges two checkpoints that are there, unless they are refused with a sentence."""
    with pytest.raises(ValueError, match=refusal) if refusal else nullcontext():
        merge_checkpoints(folder / "base", folder / "adapted", folder / "out", 0.5)
    assert (folder / "out").exists() == (refusal is None)


def assert_equal(tensors: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_are_the_inputs_and_between_them_it_is_the_formula_of_the_paper(tmp_path, dtype):
    base, adapted = tensors_of(0, dtype), tensors_of(1, dtype)
    assert_equal(merged(tmp_path, base, adapted, 0.0), base)
    assert_equal(merged(tmp_path, base, adapted, 1.0), adapted)
    # one rounding to the stored dtype, and the working precision
    eps = torch.finfo(dtype).eps
    if dtype != torch.float64:
        eps = max(eps, torch.finfo(torch.float32).eps)
    for lam in (0.2, 0.5, 0.8):
        result = merged(tmp_path, base, adapted, lam)
        for name in base:
            oracle = (1 - lam) * base[name].double() + lam * adapted[name].double()
            assert result[name].dtype == dtype
            assert torch.allclose(result[name].double(), oracle, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_training_has_changed_is_added_to_another_base(tmp_path, dtype):
    base, adapted, origin = (tensors_of(seed, dtype) for seed in range(3))
    adapted[NORM] = origin[NORM]
    result = merged(tmp_path, base, adapted, 1.0, origin=write(tmp_path / "origin", origin))
    changed = {n: base[n].double() + (adapted[n].double() - origin[n].double()) for n in base}
    assert_equal(result, {n: w.to(dtype) for n, w in changed.items()} | {NORM: base[NORM]})
    write(tmp_path / "other", origin, config={"model_type": "toy", "rms_norm_eps": 1e-5})
    (tmp_path / "base" / "config.json").write_text('{"model_type": "toy", "rms_norm_eps": 1e-6}')
    with pytest.raises(ValueError, match=r"other/config\.json has rms_norm_eps=1e-05"):
        merged(tmp_path, base, adapted, 0.5, origin=tmp_path / "other")


def test_integers_are_copied_and_if_they_differ_refused_between_the_ends(tmp_path):
    ids = {"ids": torch.tensor([1, 2])}
    result = merged(tmp_path / "a", {"w": torch.zeros(2), **ids}, {"w": torch.ones(2), **ids}, 0.25)
    assert_equal(result, {"w": torch.full((2,), 0.25), **ids})
    other = {"ids": torch.tensor([3, 4])}
    for lam, expected in ((0.0, ids), (1.0, other)):
        assert_equal(merged(tmp_path / "b", ids, other, lam), expected)
    with pytest.raises(ValueError, match=r"ids.*differs"):
        merged(tmp_path / "b", ids, other, 0.5)
    assert not (tmp_path / "b" / "merged_0.5").exists()


def test_two_floating_dtypes_give_the_one_that_holds_both(tmp_path):
    base, adapted = tensors_of(0, torch.bfloat16), tensors_of(1, torch.float32)
    assert_equal(merged(tmp_path, base, adapted, 1.0), adapted)


@pytest.mark.parametrize("changed", ["base", "adapted", "both"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_merged_only_if_they_are_equal(tmp_path, changed, value):
    sides = {"base": tensors_of(0), "adapted": tensors_of(1)}
    for name in sides if changed == "both" else [changed]:
        sides[name][NORM][1] = value
    if changed == "both" and value == torch.inf:  # such as a mask; what is equal stays so
        sides["adapted"] = sides["base"]
        assert_equal(merged(tmp_path, *sides.values(), 0.3), sides["base"])
        return
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight' has values that are infinite or no"
    ):
        merged(tmp_path, sides["base"], sides["adapted"], 0.5)
    ends = [merged(tmp_path, *sides.values(), lam)[NORM] for lam in (0.0, 1.0)]
    assert [end.nan_to_num().tolist() for end in ends] == [
        tensors[NORM].nan_to_num().tolist() for tensors in sides.values()
    ]


@pytest.mark.parametrize("stored_in", ["base", "adapted"])
def test_a_tied_weight_that_only_one_side_stores_stays_tied(tmp_path, stored_in):
    sides = {"base": tensors_of(0), "adapted": tensors_of(1)}
    sides[stored_in]["lm_head.weight"] = sides[stored_in]["model.embed_tokens.weight"].clone()
    result = merged(tmp_path, sides["base"], sides["adapted"], 0.4)
    assert result.keys() == sides["base"].keys()
    if stored_in == "base":
        assert torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])


def test_equal_vectors_are_not_tied_weights(tmp_path):
    """Norms of ones are equal by chance: the adapted model's own one is missing here."""
    base = {"a.norm": torch.ones(4), "b.norm": torch.ones(4)}
    with pytest.raises(ValueError, match=r"b\.norm"):
        merged(tmp_path, base, {"a.norm": torch.full((4,), 3.0)}, 0.5)


def test_output_shards_respect_the_limit_and_have_an_index(tmp_path):
    adapted = tensors_of(1)
    result = merged(tmp_path, tensors_of(0), adapted, 1.0, max_shard_bytes=200)
    assert_equal(result, adapted)
    out = tmp_path / "merged_1.0"
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


def test_an_interrupted_merge_starts_again(tmp_path):
    rest = tmp_path / ".merged_1.0.partial"
    rest.mkdir()
    (rest / "model-00001-of-00009.safetensors").write_bytes(b"half")
    assert_equal(merged(tmp_path, tensors_of(0), tensors_of(1), 1.0), tensors_of(1))
    assert not rest.exists()


def test_a_full_disk_is_no_fault_of_the_inputs(tmp_path):
    sides = [write(tmp_path / name, tensors_of(n)) for n, name in enumerate(("base", "adapted"))]
    sentence = r"model\.safetensors cannot be written .*: make room"
    with largest_file(200), pytest.raises(OSError, match=sentence):
        merge_checkpoints(*sides, tmp_path / "out", 0.5)


def test_the_working_folder_may_be_the_output(tmp_path, monkeypatch):
    for name, number in (("base", 0), ("adapted", 1)):
        write(tmp_path / name, tensors_of(number))
    (out := tmp_path / "out").mkdir()
    monkeypatch.chdir(out)
    merge_checkpoints("../base", "../adapted", ".", 1.0)
    assert_equal(read(out), tensors_of(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NORM: None}, ["adapted lacks the tensor 'model.norm.weight' of"]),
        ({"model.extra.weight": torch.ones(2)}, ["base lacks the tensor 'model.extra.weight' of"]),
        ({NORM: torch.ones(5)}, [NORM, "(5,)", "(4,)"]),
        ({NORM: torch.ones(4, dtype=torch.int64)}, [NORM, "int64", "float32"]),
        ({NORM: torch.ones(4).to(torch.float8_e4m3fn)}, [NORM, "quantised"]),
    ],
    ids=["missing", "extra", "shape", "dtype", "quantised"],
)
def test_checkpoints_that_do_not_match_are_refused(tmp_path, change, words):
    changed = {**tensors_of(1), **change}
    adapted = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(ValueError) as error:
        merged(tmp_path, tensors_of(0), adapted, 0.5)
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / "merged_0.5").exists()


def test_wrong_arguments_are_refused(tmp_path):
    base, new = write(tmp_path / "base", tensors_of(0)), tmp_path / "out"
    torn = write(tmp_path / "torn", tensors_of(0), shards=2)
    (torn / "model-1.safetensors").unlink()
    damaged = write(tmp_path / "damaged", tensors_of(0), shards=2)
    (damaged / "model-1.safetensors").write_bytes(b"x" * 20)
    weightless = write(tmp_path / "weightless", {})
    (weightless / "model.safetensors").unlink()
    nameless = write(tmp_path / "nameless", tensors_of(0))
    (nameless / "config.json").unlink()
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path / "nowhere")
    for adapted, out, lam, sentence in (
        (base, new, 1.5, r"lambda is 1\.5"),
        (base, base, 0.5, "already holds files"),
        (base, file, 0.5, "already holds files"),
        (base, link, 0.5, "is a link"),
        (nameless, new, 0.5, r"nameless has no config\.json.*nemo-rod export.* an adapter"),
        (tmp_path / "nowhere", new, 0.5, r"nowhere has no config\.json"),
        (weightless, new, 0.5, "holds none"),
        (torn, new, 0.5, r"lacks model-1\.safetensors"),
        (damaged, new, 0.5, r"model-1\.safetensors is not a complete safetensors file"),
    ):
        for sides in ((base, adapted), (adapted, base)):
            with pytest.raises(ValueError, match=sentence):
                merge_checkpoints(*sides, out, lam)


def test_predictors_that_training_left_out_are_not_merged(tmp_path):
    one, other = tensors_of(1), tensors_of(2)
    base = {**one, "mtp.fc.weight": torch.ones(2, 2)}
    expected = {name: torch.lerp(one[name], other[name], 0.5) for name in one}
    assert_equal(merged(tmp_path / "base_alone", base, other, 0.5), expected)
    result = merged(tmp_path / "both", base, {**other, "mtp.fc.weight": torch.zeros(2, 2)}, 0.5)
    assert_equal(result, {**expected, "mtp.fc.weight": torch.full((2, 2), 0.5)})


def test_the_command_takes_two_folders(tmp_path):
    base, adapted, out = tensors_of(0), tensors_of(1), tmp_path / "out"
    folders = [write(tmp_path / "base", base), write(tmp_path / "adapted", adapted), out]
    done = nemo_rod("merge", *folders, "lambda=0.25")
    assert done.stdout.startswith(f"{out}: 0.75 of {folders[0]} and 0.25 of "), done.stderr
    assert_equal(read(out), {name: torch.lerp(base[name], adapted[name], 0.25) for name in base})


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "use_cache": True}
PLAIN = {**LLAMA, "hidden_act": "silu", "text_config": {"head_dim": 1}}


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads=2, but that of .* has 4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', but .* 'silu'"),
        ({"text_config": {"head_dim": 2}}, "text_config.head_dim=2"),
        # what only one version of transformers writes, or what computes nothing
        ({"use_cache": False, "dtype": "float32", "transformers_version": "5"}, None),
        ({"rope_parameters": {"rope_theta": 1e4}, "attention_bias": False}, None),
        ({"max_position_embeddings": 9, "do_sample": True, "eos_token_id": [2]}, None),
    ],
)
def test_checkpoints_whose_configurations_compute_something_else_are_refused(
    tmp_path, new, sentence
):
    write(tmp_path / "base", tensors_of(0), config={**PLAIN, "max_position_embeddings": 8})
    write(tmp_path / "adapted", tensors_of(1), config={**PLAIN, **new})
    merge_or_refuse(tmp_path, sentence)


@pytest.mark.parametrize("has_head", [True, False])
def test_an_output_layer_that_only_one_side_ties_is_refused_if_both_store_one(tmp_path, has_head):
    """The other's would be ignored; `test_a_tied_weight_...` is for one that is not stored."""
    for number, (side, is_tied) in enumerate((("base", True), ("adapted", False))):
        tensors = tensors_of(number)
        if has_head:
            tensors["lm_head.weight"] = torch.rand(11, 4)
        write(tmp_path / side, tensors, config={**LLAMA, "tie_word_embeddings": is_tied})
    merge_or_refuse(tmp_path, "tie_word_embeddings=False, but that of" if has_head else None)


def test_frequencies_that_old_checkpoints_store_are_left_out(tmp_path):
    base, inverse = tensors_of(0), "model.layers.0.self_attn.rotary_emb.inv_freq"
    result = merged(tmp_path, {**base, inverse: torch.ones(2)}, tensors_of(1), 0.0)
    assert_equal(result, base)


def with_words(words: Any) -> dict[str, Any]:
    return {"model": {"vocab": words}, "added_tokens": [{"id": 2, "content": "<eos>"}]}


AB, BA = {"a": 0, "b": 1}, {"b": 0, "a": 1}
SCORED_AB, SCORED_BA = [["a", -1.0], ["b", -2.0]], [["b", -1.0], ["a", -2.0]]


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "sentence"),
    [
        ("tokenizer_config.json", {"chat_template": "a"}, {"chat_template": "b"}, None),
        ("tokenizer.json", with_words(AB), with_words(BA), "gives words other ids than that of"),
        ("tokenizer.json", with_words(SCORED_AB), with_words(SCORED_BA), "other ids"),
        ("tokenizer.json", with_words(AB), with_words({"a": 0}), "other ids"),
        ("tokenizer.json", with_words(AB), with_words({"b": 1, "a": 0}), None),
        ("tokenizer.model", "pieces", "other pieces", "one tokenizer"),
        ("vocab.json", AB, BA, "one tokenizer"),
    ],
)
def test_checkpoints_of_other_tokenizers_are_refused(tmp_path, name, ours, theirs, sentence):
    for side, value in (("base", ours), ("adapted", theirs)):
        (write(tmp_path / side, tensors_of(0)) / name).write_text(json.dumps(value))
    merge_or_refuse(tmp_path, sentence)
