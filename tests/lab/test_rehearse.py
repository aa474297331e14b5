"""Recipes rehearsed whole, by the command itself: one small here, all of them in a lane.

`make test-rehearsal` rehearses every setting of the paper with all of its arms, and a recipe of
every other model type.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import OF_THE_PAPER, composed, nemo_rod

for module in ("megatron", "datasets", "pyarrow"):
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)
transformers = pytest.importorskip("transformers")
if find_spec("transformers.models.qwen3_5") is None:
    pytest.skip("this transformers has no Qwen3.5 and no Nemotron-H", allow_module_level=True)

from architectures import TYPES  # noqa: E402
from corpus_cases import texts as made_texts  # noqa: E402
from made_up_run import make_texts  # noqa: E402

from nemo_rod.corpus import BlockStore, load_tokenizer  # noqa: E402
from nemo_rod.lab.launches import read_launch  # noqa: E402
from nemo_rod.lab.rehearsal import command  # noqa: E402

QWEN3 = {  # Qwen3-0.6B, with few tokens
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "num_hidden_layers": 28, "vocab_size": 1000},
}
IN_FULL_PRECISION = (  # one of each class
    *("german_qwen3_5_9b", "german_qwen3_5_35b_a3b", "legal_nemotron_nano_12b_v2"),
    *("german_nemotron_3_nano_30b_a3b", "german_qwen3_0_6b"),
)


def rehearse(recipe: str, folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """The table of a rehearsal, and what was printed."""
    words = (f"recipe={recipe}", f"run_dir={folder / 'run'}", *overrides)
    done = nemo_rod("rehearse", *words, trains=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / "run").exists()
    return json.loads((folder / "run_rehearsal" / "table.json").read_text()), done.stdout


def published(folder: Path, kind: str, **described: Any) -> Path:
    """A folder with what a rehearsal reads of a published model: its description and tokenizer."""
    config = transformers.AutoConfig.for_model(kind, **described)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [names[kind]]
    config.save_pretrained(folder)
    load_tokenizer("byte").save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def difference(table: dict[str, Any]) -> float:
    """Of all exports: the largest difference of a source's loss from Megatron's, in nats."""
    (note,) = [row["note"] for row in table["rows"] if row["name"] == "losses"]
    return float(note.split()[-3])


def checked_states(table: dict[str, Any]) -> dict[str, str]:
    states = {row["name"]: row["state"] for row in table["rows"]}
    assert set(states.values()) <= {"done", "not seen"}
    return states


@pytest.mark.timeout(600)
def test_a_recipe_of_ones_own_is_rehearsed_on_its_own_text(tmp_path, capsys):
    make_texts(texts := tmp_path / "texts")
    model = published(tmp_path / "model", "qwen3", **QWEN3)
    sources = (
        *(f"new: {{role: adaptation, kind: text, files: [{texts}/*.txt]}}",),
        *(f"lines: {{role: replay, kind: jsonl, files: [{texts}/*.jsonl], dedup: true}}",),
        *(f"table: {{role: replay, kind: parquet, files: [{texts}/*.parquet]}}",),
        *(f"far: {{role: replay, kind: huggingface, path: {'some/dataset'}}}",),
    )
    recipe = tmp_path / "my" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\ndefaults: [override /cluster: h100_1, override /parallel: single]\n"
        "arms: [no_replay]\n"
        f"model: {{hf: {model}}}\ndomain:\n  tokenizer: {model}\n  sources:\n    "
        + "\n    ".join(sources)
        + "\ntrain: {steps: 900, batch_size: 64, micro_batch_size: 4, lr: 1.0e-4}\n"
        "scoring: {micro_batch_size: 8}\n"
    )
    few = ("rehearsal.steps=2", "rehearsal.processes=1")
    words = ("--config-dir", str(tmp_path / "my"), *few)
    table, output = rehearse("mine", tmp_path, *words)
    states = checked_states(table)
    assert [name for name, state in states.items() if state != "not seen"][-7:] == [
        *("materials", "prepare", "base", "no_replay", "evaluate", "report", "losses")
    ]
    assert "made-up text for far, as the hub does not answer" in output
    folder = tmp_path / "run_rehearsal"
    store, own = BlockStore(folder / "blocks"), load_tokenizer(str(model))
    assert store.tokenizer_fingerprint == own.fingerprint
    first = {s.name: own.decode(store.tokens([s.start])[0]) for s in store.sources}
    documents = "\n".join(made_texts(40, 1))
    for name in ("new", "lines", "table"):
        assert first[name].split("\0")[0].strip("\ufffd")[:20] in documents, name
    results = json.loads((folder / "report" / "results.json").read_text())
    assert set(results["arms"]) == {"base", "no_replay"}
    assert "1 H100 on 1 node" in output
    np.save(file := folder / "arms" / "no_replay" / "held_out_losses.npy", np.load(file) + 10)
    with pytest.raises(ValueError, match=r"no_replay on new differs by 10 nats from that"):
        command._compare_losses(read_launch(folder)[1])
    dry = nemo_rod("rehearse", "recipe=mine", f"run_dir={tmp_path / 'run'}", *words, "dry_run=true")
    assert "layout" in dry.stdout and "losses" not in dry.stdout  # checks, and changes nothing
    assert (folder / "report" / "index.html").exists()


def test_failed_checks_end_a_rehearsal_before_anything_is_made(tmp_path, capsys):
    recipe, model = "german_qwen3_5_4b", published(tmp_path / "model", "qwen3")
    config = {**json.loads((model / "config.json").read_text()), "architectures": ["Fancy"]}
    (model / "config.json").write_text(json.dumps(config))
    words = (f"run_dir={tmp_path / 'run'}", f"model.hf={model}", "parallel.pipeline=3")
    with pytest.raises(RuntimeError, match=f"the rehearsal of {recipe} failed at layout"):
        command.rehearse(composed(f"recipe={recipe}", *words))
    output = capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run_rehearsal").iterdir()] == ["table.json"]
    table = json.loads((tmp_path / "run_rehearsal" / "table.json").read_text())
    notes = {part["name"]: part["note"] for part in table["rows"] if part["state"] == "FAILED"}
    for row, sentence in (("layout", "pipeline=3 x virtual"), ("class", "of the class Fancy")):
        assert f"{row}: " in output and sentence in output and sentence in notes[row]


@pytest.mark.rehearsal
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", OF_THE_PAPER)
def test_every_arm_of_a_setting(recipe, tmp_path):
    table, _ = rehearse(recipe, tmp_path)
    checked_states(table)
    arms = {"base", *composed(f"recipe={recipe}").arms}
    results = json.loads((tmp_path / "run_rehearsal" / "report" / "results.json").read_text())
    assert {*results["arms"]} == arms and difference(table) <= 0.01


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", IN_FULL_PRECISION)
def test_losses_are_hugging_faces_in_full_precision(recipe, tmp_path):
    # in twice the memory of bf16, the real layouts need recompute, which changes no bit
    whole = ("model.precision=fp32", "plan.peak_tflops=80", "train.recompute=full")
    table, _ = rehearse(recipe, tmp_path, "arms=[base,no_replay]", *whole)
    assert difference(table) <= 1e-5


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", TYPES)
def test_every_other_type_of_model(kind, tmp_path):
    folder = published(tmp_path / "published", kind, **TYPES[kind])
    model = (f"model.hf={folder}", "model.precision=fp32", "~cluster")
    table, _ = rehearse(
        "german_smollm2_135m", tmp_path, *model, "arms=[base,rod]", "rehearsal.steps=2"
    )
    assert difference(table) <= 1e-5


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
def test_tasks_are_run_by_lm_eval(tmp_path):
    pytest.importorskip("lm_eval")
    rehearse("german_nemotron_nano_12b_v2", tmp_path, "arms=[no_replay]", "tasks=paper")
    file = tmp_path / "run_rehearsal" / "arms" / "no_replay" / "tasks.json"
    result = json.loads(file.read_text())
    expected = composed("recipe=toy_synthetic", "tasks=paper").tasks.capabilities
    assert set(result["capabilities"]) == set(expected)
    assert all(task["questions"] == 8 for task in result["tasks"].values())
