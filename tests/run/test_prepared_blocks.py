"""What a domain's blocks must be fit for, beyond being blocks."""

import os
import shutil
from pathlib import Path

import pytest
from command_line import nemo_rod
from corpus_cases import texts, write

from nemo_rod.config import Domain
from nemo_rod.run.prepared_blocks import prepare_blocks

RECIPE = """# @package _global_
defaults:
  - override /model: toy_qwen3
  - override /parallel: single
arms: [{arms}]
pretrain: {{steps: 2, batch_size: 8, micro_batch_size: 8, lr: 1e-3}}
train: {{steps: 2, batch_size: 8, micro_batch_size: 8, lr: 1e-3}}
scoring: {{micro_batch_size: 8}}
domain:
  tokenizer: byte
  block_size: 64
  sources:
    {source}: {{role: adaptation, kind: jsonl, files: ["{files}"]}}
"""
BESIDE = "    web: {role: replay, kind: jsonl, files: [replay.jsonl]}\n"
SOURCES = {
    "dialect": {"role": "adaptation", "kind": "synthetic", "files": ["dialect:0:0.25"]},
    "chain": {"role": "replay", "kind": "synthetic", "files": ["markov:0"]},
}


def domain(holdout_fraction: float) -> Domain:
    sources = {name: {**source, "max_bytes": 20_000} for name, source in SOURCES.items()}
    return Domain(
        sources=sources, tokenizer="byte", block_size=64, holdout_fraction=holdout_fraction
    )


def test_every_source_has_held_out_blocks(tmp_path):
    outputs = prepare_blocks(domain(0.1), tmp_path / "held")
    assert outputs["num_adaptation"] > 0 and outputs["num_replay"] > 0
    with pytest.raises(ValueError, match="adaptation source dialect has no held-out block: give"):
        prepare_blocks(domain(0.0), tmp_path / "none")


def recipe(folder: Path, *, beside: str = BESIDE, mark: str = "", **values: str) -> list[str]:
    """Words of a command on a recipe in a folder."""
    values = {"arms": "base, no_replay, rod", "source": "new", "files": "data/*.jsonl", **values}
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe/mine.yaml").write_text(mark + RECIPE.format(**values) + beside, "utf-8")
    write(folder / "data/1.jsonl", texts(60, 1))
    write(folder / "data/2.jsonl", texts(60, 2))
    write(folder / "replay.jsonl", texts(60, 3))
    return ["--config-dir", ".", "recipe=mine"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The folder of a recipe whose blocks are made."""
    folder = tmp_path_factory.mktemp("prepared")
    assert nemo_rod("prepare", *recipe(folder), cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: None, ""),
        (lambda data: write(data / "3.jsonl", ["more"]), "3.jsonl of source new was added since;"),
        (lambda data: (data / "2.jsonl").unlink(), "2.jsonl of source new was removed since;"),
        (lambda data: write(data / "2.jsonl", ["x"]), "2.jsonl of source new was changed since;"),
        (
            lambda data: shutil.rmtree(data.parent / "runs/mine/blocks/adaptation/new"),
            "adaptation/new/manifest.json is missing: add rebuild=[prepare]",
        ),
        (lambda data: data.rename(data.with_name("moved")), ""),  # blocks outlive their sources
    ],
)
def test_blocks_of_other_files_are_not_done(prepared, tmp_path, change, sentence):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "data")
    words = ("prepare", "--config-dir", ".", "recipe=mine")
    done = nemo_rod(*words, cwd=tmp_path)
    assert (done.returncode, sentence in done.stderr) == (2 if sentence else 0, True), done.stderr
    assert ("done before" in done.stderr) == (not sentence)
    if sentence:
        again = nemo_rod(*words, "rebuild=[prepare]", cwd=tmp_path)
        assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"beside": ""},
            "domain.sources has no source with role=replay, which rod trains on: add one "
            "(kind=generated lets the base write replay)",
        ),
        (
            {"beside": "", "arms": "base, no_replay"},
            "which base trains on: add one, or name a base that is trained (model.hf).",
        ),
        ({"mark": "\ufeff"}, "recipe/mine.yaml begins with a byte-order mark: save it as UTF-8"),
    ],
)
def test_recipes_that_cannot_run_are_told_so(tmp_path, values, sentence):
    words = [*recipe(tmp_path, **values), "plan.adaptation_tokens=1e5"]
    done = nemo_rod("plan", *words, cwd=tmp_path)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr


def test_file_names_under_an_ascii_locale(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for files, status in (("data/*.jsonl", 0), ("grün/*.jsonl", 2)):
        words = recipe(tmp_path, files=files)
        words = [*words, f"run_dir=out{status}"]
        done = nemo_rod("prepare", *words, cwd=tmp_path, env={**os.environ, **ascii_only})
        assert done.returncode == status, done.stderr
    assert "are read as ascii under this locale: set PYTHONUTF8=1" in done.stderr
