"""A materialised curriculum: the recorded blocks in their order, from every format and any stop."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import here, nemo_rod
from places import ROOT
from random_curriculum import write_curriculum
from tiny import metric, sources

from nemo_rod.corpus import BlockStore, load_tokenizer, prepare
from nemo_rod.lab import materialise
from nemo_rod.lab.curricula import FORMATS
from nemo_rod.selection import Curriculum

S, K, STEPS = 64, 6, 7


def example(name: str) -> Any:
    """A program of the documents, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a store, a scored arm and one without scores."""
    root = tmp_path_factory.mktemp("run")
    store = prepare(root / "blocks", sources(), tokenizer=load_tokenizer("byte"), block_size=S)
    for arm, scored in (("rod", True), ("plain", False)):
        path = root / "arms" / arm / "curriculum.rod"
        write_curriculum(path, store, steps=STEPS, batch_size=K, scored=scored)
    return root


def read(out: Path, format: str) -> list[dict[str, Any]]:
    """The rows of a folder by those that read folders, and by Megatron."""
    import pandas
    import pyarrow.parquet as pq
    from datasets import load_dataset

    rows = pq.read_table(out).to_pylist()
    assert len(table := pandas.read_parquet(out)) == len(rows) and {*table} == {*rows[0]}
    for given in ({"path": str(out)}, {"path": "parquet", "data_dir": str(out)}):
        dataset = load_dataset(**given, cache_dir=str(out.parent / "cache"))["train"]
        assert len(dataset) == len(rows) and {*dataset.features} == {*rows[0]}
    if format == "megatron":
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        blocks = IndexedDataset(str(out / "__megatron__" / "blocks"))
        assert len(blocks) == len(rows) == len(blocks.document_indices) - 1
        in_order = example("megatron_in_order").InOrder(str(out / "__megatron__" / "blocks"))
        for row, block, sample in zip(rows, blocks, in_order, strict=True):
            row["input_ids"] = block.tolist()
            assert sample["tokens"].tolist() == row["input_ids"]
            assert sample["labels"][:-1].tolist() == row["input_ids"][1:]
            assert sample["loss_mask"].sum() == len(block) - 1
    return rows


def files(out: Path) -> dict[str, bytes]:
    return {str(file.relative_to(out)): file.read_bytes() for file in out.glob("**/*.*")}


def expected(run: Path, arm: str) -> list[dict[str, Any]]:
    store = BlockStore(run / "blocks")
    rows, scored = [], arm == "rod"
    for record in Curriculum.open(run / "arms" / arm / "curriculum.rod", read_only=True):
        for position, place in enumerate(record.chosen):
            ids = record.block_ids[place : place + 1]
            source = store.sources[store.source_index(ids)[0]]
            row = {
                "step": record.step, "position": position, "block_id": int(ids[0]),
                "hash": store.hashes(ids)[0].tobytes().hex(), "source": source.name,
                "role": source.role, "score": float(record.score[place]) if scored else None,
                "loss": float(record.loss[place]) if scored else None,
                "input_ids": store.tokens(ids)[0].tolist(),
            }  # fmt: skip
            rows.append(row)
    return rows


@pytest.mark.parametrize("arm", ["rod", "plain"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_blocks_in_order(run, arm, format, tmp_path, capsys):
    words = ("curriculum", "materialise", run / "arms" / arm, "--format", format)
    here(*words, tmp_path / "all")
    assert f"{STEPS * K} blocks of {STEPS} steps" in capsys.readouterr().out
    assert read(tmp_path / "all", format) == expected(run, arm)


@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupted_call_is_continued(run, format, tmp_path, monkeypatch):
    store = BlockStore(run / "blocks")
    curriculum = Curriculum.open(run / "arms" / "rod" / "curriculum.rod", read_only=True)
    options = {"format": format, "part_tokens": 2 * K * S}  # parts of two steps
    materialise.materialise(curriculum, store, tmp_path / "whole", **options)
    whole = files(tmp_path / "whole")
    assert len(whole) >= 5
    real = store.checked_tokens
    for stop in range(1, STEPS):
        out, left = tmp_path / str(stop), iter(range(stop))

        def killed(ids: Any, left: Any = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(ids)

        monkeypatch.setattr(store, "checked_tokens", killed)
        with pytest.raises(KeyboardInterrupt):
            materialise.materialise(curriculum, store, out, **options)
        assert not (out / ".manifest.json").exists()
        if stop == 3:  # lost since
            shutil.rmtree(out / "__megatron__", ignore_errors=True)
        monkeypatch.setattr(store, "checked_tokens", real)
        materialise.materialise(curriculum, store, out, **options)
        assert files(out) == whole


@pytest.mark.parametrize(
    ("format", "lost", "rest"),
    [
        *((format, "*-00001.parquet", 0) for format in FORMATS),
        *(("megatron", "*/blocks.bin", rest) for rest in (0, 4 * S)),
        ("megatron", "*/blocks.idx", 0),
    ],
)
def test_what_was_removed_is_written_again(run, format, lost, rest, tmp_path):
    store = BlockStore(run / "blocks")
    curriculum = Curriculum.open(run / "arms" / "rod" / "curriculum.rod", read_only=True)
    options = {"format": format, "part_tokens": 2 * K * S}
    materialise.materialise(curriculum, store, tmp_path / "out", **options)
    whole = files(tmp_path / "out")
    (file,) = (tmp_path / "out").glob(lost)
    os.truncate(file, rest) if rest else file.unlink()
    materialise.materialise(curriculum, store, tmp_path / "out", **options)
    assert files(tmp_path / "out") == whole


def test_what_cannot_be_written_is_refused(run, tmp_path):
    rod, plain, out, mine = run / "arms/rod", run / "arms/plain", tmp_path / "out", tmp_path / "me"
    mine.mkdir()
    (mine / "notes.txt").touch()
    here("curriculum", "materialise", rod, "--format", "megatron", out)
    blocks = ("--blocks", tmp_path / "blocks")
    prepare(blocks[1], sources()[:2], tokenizer=load_tokenizer("byte"), block_size=S)
    (file := tmp_path / "file").touch()
    for arm, folder, format, more, words in (
        (rod, file, "parquet", (), "file is a file: choose a new folder, or remove it"),
        (rod, file / "in", "parquet", (), "file is a file: choose a new folder, or remove it"),
        (rod, mine, "megatron", (), r"notes\.txt"),
        (rod, out, "parquet", (), "format=megatron, but now it is parquet"),
        (plain, out, "megatron", (), "config=rod, but now it is plain"),
        (rod, tmp_path / "new", "parquet", blocks, "but the block store has"),
    ):
        with pytest.raises(ValueError, match=words):
            here("curriculum", "materialise", arm, folder, "--format", format, *more)
    assert not (tmp_path / "new").exists()


def test_a_plain_loop_repeats_the_training(tiny, tmp_path, monkeypatch):
    """The rod arm of the tiny setting, trained again by the program of the documents."""
    from transformers import AutoModelForCausalLM

    plain = example("train_on_curriculum")
    tiny.single()
    arm = tiny.root / "single"
    words = ("curriculum", "materialise", arm, "--blocks", tiny.blocks, "--format", "parquet")
    assert nemo_rod(*words, tmp_path / "data").returncode == 0
    rows = list(plain.rows(tmp_path / "data"))
    model = AutoModelForCausalLM.from_pretrained(tiny.base, dtype="float32")
    losses = list(plain.train(model, rows, iter(metric(arm, "train/lr"))))
    np.testing.assert_allclose(losses, metric(arm, "train/loss"), rtol=0, atol=2e-6)
    words = [str(tiny.base), str(tmp_path / "data"), str(tmp_path / "trained")]
    monkeypatch.setattr(sys, "argv", ["train_on_curriculum.py", *words])
    plain.main()
    assert (tmp_path / "trained" / "config.json").exists()
