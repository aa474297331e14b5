"""The house works without the rooms beside it."""

import re
import shutil
import zipfile
from pathlib import Path

import modules_logger
import pytest
from command_line import nemo_rod, with_packages
from tiny_recipe import ARMS, RECIPE

from nemo_rod import cli, parts
from nemo_rod.files import read_json

STAGES = (  # of RoD's arm, each as a command
    *("prepare", "pretrain", "reference arm=base", "train arm=no_replay"),
    *("reference arm=no_replay", "train arm=rod", "evaluate"),
)


def without(room: str, wheel: Path, folder: Path) -> dict[str, str]:
    """The environment of an installation that lacks a room and its entry points."""
    zipfile.ZipFile(wheel).extractall(folder)
    shutil.rmtree(folder / "nemo_rod" / room)
    (points,) = folder.glob("*.dist-info/entry_points.txt")
    lines = points.read_text().splitlines(keepends=True)
    points.write_text("".join(line for line in lines if f"nemo_rod.{room}." not in line))
    modules_logger.install(folder)
    return with_packages(folder)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["lab", "hosts"])
def test_a_recipe_runs_without_a_room(room, wheel, tmp_path):
    environment, cwd = without(room, wheel, tmp_path / "installed"), tmp_path / "cwd"
    cwd.mkdir()
    stages = STAGES if room == "lab" else ("run",)  # with the report
    for stage in stages:
        command, *words = stage.split()
        done = nemo_rod(command, *RECIPE, "logger=[modules]", *words, cwd=cwd, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
    for name in ARMS:
        losses = read_json(cwd / "run" / "arms" / name / "evaluation.json")["loss"]
        assert set(losses) == {"adaptation", "replay"}
    assert (cwd / "run" / "report").exists() == (room != "lab")
    trained = modules_logger.imported(cwd / "run" / "arms" / "rod")
    assert "nemo_rod.megatron.rod_selector" in trained
    assert not [name for name in trained if re.match(r"nemo_rod\.(lab|hosts)\b", name)]


def test_a_package_without_metadata_says_so(monkeypatch):
    monkeypatch.setattr(parts, "registered", lambda: ({}, {}))
    monkeypatch.setattr("sys.argv", ["nemo-rod", "status", "run"])
    for call in (lambda: parts.load("hosts", "megatron_bridge"), cli._run_command):
        with pytest.raises(ValueError, match=r"one of .*\. nemo_rod is on the path, but"):
            call()


def test_what_is_not_there_is_said(wheel, tmp_path):
    environment = without("lab", wheel, tmp_path)
    for words, sentence in (
        ("status run", "There is no command 'status': expected one of run, prepare, "),
        ("run recipe=toy_synthetic", "makes the arm merge_0.6: take it out of arms=[...], or"),
        ("run recipe=toy_synthetic report.prompts=[]", "There is no key report.prompts: "),
    ):
        done = nemo_rod(*words.split(), cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert sentence in done.stderr
    helped = nemo_rod("help", cwd=tmp_path, env=environment).stdout
    assert "nemo-rod run recipe=NAME" in helped and "nemo-rod status" not in helped
