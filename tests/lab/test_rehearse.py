"""Recipes rehearsed whole, by the command itself: one small here, all of them in a lane.

`make test-rehearsal` rehearses every setting of the paper with all of its arms, and a recipe of
every other model type.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command_line import OF_THE_PAPER, composed, nemo_rod

for module in ("megatron", "datasets", "pyarrow"):
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)
transformers = pytest.importorskip("transformers")
if find_spec("transformers.models.qwen3_5") is None:
    pytest.skip("this transformers has no Qwen3.5 and no Nemotron-H", allow_module_level=True)

from architectures import TYPES  # noqa: E402

from nemo_rod.lab.rehearsal import command  # noqa: E402
from nemo_rod.lab.rehearsal.special_tokens import special_tokens, write_tokenizer  # noqa: E402

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


def differences(folder: Path) -> dict[str, float]:
    """Of every export: the largest difference of a source's loss from Megatron's, in nats."""
    file = folder / "run_rehearsal" / "losses" / "losses.json"
    difference: dict[str, float] = json.loads(file.read_text())["difference"]
    return difference


def checked_states(table: dict[str, Any]) -> dict[str, str]:
    states = {row["name"]: row["state"] for row in table["rows"]}
    assert set(states.values()) <= {"done", "not seen"}
    return states


@pytest.mark.timeout(600)
def test_a_recipe_is_rehearsed_from_text_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = "german_qwen3_0_6b"
    few = ("arms=[no_replay]", "rehearsal.steps=2", "rehearsal.processes=1")
    table, output = rehearse(recipe, tmp_path, *few)
    states = checked_states(table)
    assert [name for name, state in states.items() if state != "not seen"][-8:] == [
        *("materials", "prepare", "model", "base", "no_replay", "evaluate", "report", "losses"),
    ]
    folder = tmp_path / "run_rehearsal"
    results = json.loads((folder / "report" / "results.json").read_text())
    assert set(results["arms"]) == {"base", "no_replay"}
    planned = {stage["name"]: stage for stage in table["plan"]["stages"]}
    assert planned["no_replay"]["gpu_hours"] > 0.5  # what the real run needs, not the rehearsal
    assert "no_replay" in output and "1 H100 on 1 node" in output
    words = (f"recipe={recipe}", f"run_dir={tmp_path / 'run'}", *few, "dry_run=true")
    command.rehearse(composed(*words))  # checks, and changes nothing
    output = capsys.readouterr().out
    assert "layout" in output and "losses" not in output
    assert (folder / "report" / "index.html").exists()


def test_failed_checks_end_a_rehearsal_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, wrong = "german_qwen3_5_4b", ("domain.eod=7", "parallel.pipeline=3")
    expected = {
        "end of documents": "Documents would end with id 7 (an ordinary token), but in the "
        "pretraining of Qwen/Qwen3.5-4B-Base they ended with id 151643 (<|endoftext|>",
        "tokenizer": "domain.tokenizer=Qwen/Qwen3-0.6B-Base is the tokenizer of another model than "
        "model.hf=Qwen/Qwen3.5-4B-Base",
        "layout": "pipeline=3 x virtual_pipeline=1 does not divide num_hidden_layers=32",
    }
    words = (f"run_dir={tmp_path / 'run'}", "domain.tokenizer=Qwen/Qwen3-0.6B-Base", *wrong)
    with pytest.raises(RuntimeError, match=f"the rehearsal of {recipe} failed at "):
        command.rehearse(composed(f"recipe={recipe}", *words))
    output = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run_rehearsal"]
    assert [path.name for path in (tmp_path / "run_rehearsal").iterdir()] == ["table.json"]
    table = json.loads((tmp_path / "run_rehearsal" / "table.json").read_text())
    notes = {part["name"]: part["note"] for part in table["rows"] if part["state"] == "FAILED"}
    assert notes.keys() == expected.keys()
    for row, sentence in expected.items():
        assert f"{row}: " in output and sentence in output and sentence in notes[row]


@pytest.mark.rehearsal
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", OF_THE_PAPER)
def test_every_arm_of_a_setting(recipe: str, tmp_path: Path) -> None:
    table, _ = rehearse(recipe, tmp_path)
    checked_states(table)
    arms = {"base", *composed(f"recipe={recipe}").arms}
    results = json.loads((tmp_path / "run_rehearsal" / "report" / "results.json").read_text())
    assert {*results["arms"]} == {*differences(tmp_path)} == arms


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", IN_FULL_PRECISION)
def test_losses_are_hugging_faces_in_full_precision(recipe: str, tmp_path: Path) -> None:
    # in twice the memory of bf16, the real layouts need recompute, which changes no bit
    whole = ("model.precision=fp32", "plan.peak_tflops=80", "train.recompute=full")
    rehearse(recipe, tmp_path, "arms=[base,no_replay]", *whole)
    near = differences(tmp_path)
    assert set(near) == {"base", "no_replay"} and max(near.values()) <= 1e-5


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", TYPES)
def test_every_other_type_of_model(kind: str, tmp_path: Path) -> None:
    published = transformers.AutoConfig.for_model(kind, **TYPES[kind])
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    published.architectures = [names[kind]]
    published.save_pretrained(tmp_path / "published")
    write_tokenizer(special_tokens("SmolLM2"), tmp_path / "published")
    model = (f"model.hf={tmp_path / 'published'}", "model.precision=fp32", "~cluster")
    rehearse("german_smollm2_135m", tmp_path, *model, "arms=[base,rod]", "rehearsal.steps=2")
    near = differences(tmp_path)
    assert set(near) == {"base", "rod"} and max(near.values()) <= 1e-5


@pytest.mark.rehearsal
@pytest.mark.timeout(1800)
def test_tasks_are_run_by_lm_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rehearse("german_nemotron_nano_12b_v2", tmp_path, "arms=[no_replay]", "tasks=paper")
    file = tmp_path / "run_rehearsal" / "arms" / "no_replay" / "tasks.json"
    result = json.loads(file.read_text())
    expected = composed("recipe=toy_synthetic", "tasks=paper").tasks.capabilities
    assert set(result["capabilities"]) == set(expected)
    assert all(task["questions"] == 8 for task in result["tasks"].values())
