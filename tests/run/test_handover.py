"""Stages: made once, skipped when done, refused when inputs changed, resumed when cut short."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rod.run import handover
from nemo_rod.run.handover import HandOver, Stage, partial


def stage(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]], *, lr: float = 0.1, **options: Any
) -> Stage:
    inputs = {"train.lr": lr}
    return HandOver("rod", tmp_path / "rod", lambda: inputs, make, **options).stage("train", "")


def write_result(folder: Path) -> dict[str, Any]:
    (folder / "result").write_text("42")
    return {"weights": "abc"}


def test_made_once_and_handed_over_whole(tmp_path):
    one = stage(tmp_path, write_result, note={"seed": 1})
    assert not one.is_done()
    one.run()
    assert one.is_done()
    assert sorted(file.name for file in one.folder.iterdir()) == ["manifest.json", "result"]
    assert not partial(one.folder).exists()
    assert handover.outputs(one.folder, made_by="train") == {"weights": "abc"}
    manifest = json.loads((one.folder / "manifest.json").read_text())
    assert manifest["inputs"] == {"train.lr": 0.1}
    assert manifest["note"] == {"seed": 1}


def test_changed_input_is_refused_by_name_and_rebuilt_on_request(tmp_path):
    stage(tmp_path, write_result).run()
    changed = stage(tmp_path, write_result, lr=0.2)
    sentence = r"train\.lr=0\.1, but now it is 0\.2: add rebuild=\[rod\]"
    with pytest.raises(ValueError, match=sentence):
        changed.is_done()
    partial(changed.folder).mkdir()
    changed.move_aside()
    assert not changed.is_done()
    changed.run()
    # what was there is kept
    assert (tmp_path / "rod.replaced-1" / "result").read_text() == "42"
    assert (tmp_path / "rod.partial.replaced-1").exists()


def test_a_note_may_change(tmp_path):
    stage(tmp_path, write_result, note={"parallel": 1}).run()
    assert stage(tmp_path, write_result, note={"parallel": 2}).is_done()


def test_interrupted_stage_goes_on_in_its_folder(tmp_path):
    def interrupted(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, interrupted).run()
    with pytest.raises(ValueError, match=r"rod\.partial was made with train\.lr=0\.1"):
        stage(tmp_path, write_result, lr=0.2).is_done()
    # a stage that looks after itself is not held to what an interrupted run was asked for
    assert not stage(tmp_path, write_result, lr=0.2, checks_itself=True).is_done()
    whole = stage(tmp_path, write_result)
    assert not whole.is_done()
    whole.run()
    assert (whole.folder / "half").exists()


def test_foreign_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "rod").mkdir()
    assert not stage(tmp_path, write_result).is_done()  # an empty one is in nobody's way
    (tmp_path / "rod" / "photo").touch()
    sentence = r"rod holds files but no manifest\.json, .* rebuild=\[rod"
    with pytest.raises(ValueError, match=sentence):
        stage(tmp_path, write_result).is_done()
    (tmp_path / "rod" / "manifest.json").write_text('{"inputs": {"train.lr": 0.1}}')
    assert stage(tmp_path, write_result).is_done()
    with pytest.raises(ValueError, match=r"rod holds files but no store\.json"):
        stage(tmp_path, write_result, proof=("manifest.json", "store.json")).is_done()
    (tmp_path / "rod" / "manifest.json").write_text('{"inputs": ')
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        stage(tmp_path, write_result).is_done()
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        handover.outputs(tmp_path / "rod", made_by="train")


def test_weights_are_as_readable_as_other_files(tmp_path):
    def save(folder: Path) -> dict[str, Any]:
        (folder / "hf").mkdir()
        (folder / "hf" / "model.safetensors").touch(mode=0o600)
        (folder / "hf" / "config.json").touch()
        return {}

    stage(tmp_path, save).run()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "rod" / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_refusal_leaves_nothing(tmp_path):
    def refuse(folder: Path) -> dict[str, Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        stage(tmp_path, refuse).run()
    assert list(tmp_path.iterdir()) == []


def test_missing_stage_names_its_command(tmp_path):
    with pytest.raises(ValueError, match=r"run `nemo-rod reference recipe=toy` first"):
        handover.outputs(tmp_path / "references", made_by="reference recipe=toy")


def test_flatten_names_every_leaf():
    value = {"lr": 0.1, "sources": {"de": {"files": ["a", "b"]}}, "none": {}}
    assert handover.flatten("x", value) == {
        "x.lr": 0.1,
        "x.sources.de.files": ["a", "b"],
        "x.none": {},
    }
