"""Weights are trained further only on the same data; a refusal names the difference."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpus_cases import run, train_bpe
from tiny import Setting, sources

from nemo_rod.config import Parallel
from nemo_rod.corpus import load_tokenizer
from nemo_rod.jobs import TrainJob, read_job

Change = Callable[[Setting, Path], dict[str, Any]]


def other_blocks(folder: Path, **options: Any) -> dict[str, Any]:
    """The tiny setting's text as other blocks."""
    run(folder, sources(), **{"block_size": 64, **options})
    return {"blocks": str(folder)}


CHANGES: dict[str, Change] = {
    "block store": lambda _, folder: other_blocks(folder / "blocks", holdout_seed=43),
    "block size": lambda _, folder: other_blocks(folder / "blocks", block_size=32),
    "tokenizer": lambda _, folder: other_blocks(
        folder / "blocks", tokenizer=load_tokenizer(str(train_bpe(folder / "bpe", 300)))
    ),
    "references": lambda tiny, _: {"references": [str(path) for path in tiny.references]},
    "configuration": lambda *_: {"config_digest": "another"},
    "seed": lambda tiny, _: {"arm": dataclasses.replace(tiny.arm("no_replay"), seed=8)},
}


def trained_job(tiny: Setting) -> TrainJob:
    job = read_job(tiny.root / "no_replay" / "job.json")
    assert isinstance(job, TrainJob)
    return job


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("difference", CHANGES)
def test_a_run_on_something_else_is_refused(tiny, tmp_path, difference):
    from nemo_rod.megatron.train_job import train

    job = dataclasses.replace(trained_job(tiny), **CHANGES[difference](tiny, tmp_path))
    with pytest.raises(
        ValueError, match=rf"iter_0000030 was trained with .*{difference} '?\w*'? \(this"
    ):
        train(job)


@pytest.mark.usefixtures("alone")
def test_an_older_megatron_than_the_one_that_saved_is_refused(tiny, monkeypatch):
    from nemo_rod.megatron import identity
    from nemo_rod.megatron.train_job import train

    here = identity.versions()
    older = {**here, "megatron-core": "0.15.3"}
    monkeypatch.setattr(identity, "versions", lambda: older)
    sentence = f"saved by megatron-core {here['megatron-core']}, and 0.15.3 is installed"
    with pytest.raises(ValueError, match=sentence):
        train(trained_job(tiny))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("was_sharded", "parallel", "saved_with"),
    [
        (False, Parallel(distributed_optimizer=True), "distributed_optimizer=false"),
        (True, Parallel(data=2), "distributed_optimizer=true"),
        (True, Parallel(tensor=2, distributed_optimizer=True), "tensor=1"),
        (True, Parallel(pipeline=2, virtual_pipeline=2, distributed_optimizer=True),
         "pipeline=1, parallel.virtual_pipeline=1"),
        (True, Parallel(data=2, expert=2, distributed_optimizer=True), "expert=1"),
    ],
)  # fmt: skip
def test_an_optimizer_that_the_layout_cannot_load_is_refused(
    tiny, tmp_path, was_sharded, parallel, saved_with
):
    from nemo_rod.megatron.train_job import train

    job = dataclasses.replace(trained_job(tiny), out=str(tmp_path / "arm"))
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, parallel=parallel))
    shutil.copytree(tiny.root / "no_replay", job.out)
    (config,) = Path(job.out).glob("checkpoints/iter_0000030/run_config.yaml")
    setting = "use_distributed_optimizer: "
    text = config.read_text()
    assert f"{setting}false" in text
    config.write_text(text.replace(f"{setting}false", f"{setting}{was_sharded}".lower()))
    with pytest.raises(ValueError, match=f"iter_0000030 was saved with parallel.{saved_with}: the"):
        train(job)
