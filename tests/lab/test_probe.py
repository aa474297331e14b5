"""`nemo-rod probe`: two short arms of a recipe, and what they say about a whole run."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import composed
from made_up_run import made_up_training, recipe

from nemo_rod.corpus import BlockStore
from nemo_rod.lab.probe.command import probe, probed
from nemo_rod.lab.probe.speed import time
from nemo_rod.selection import Curriculum

SMALL = (
    *("recipe=toy_synthetic", "parallel=single", "domain.block_size=64", "pretrain.steps=20"),
    *("train.batch_size=8", "train.micro_batch_size=8", "probe.steps=10"),
)


def test_a_probe_is_the_recipe_cut_short(tmp_path: Path) -> None:
    config = composed(*SMALL, f"run_dir={tmp_path}/run", "+domain.sources.dialect.max_tokens=900")
    small = probed(config)
    assert small.run_dir == f"{tmp_path}/run_probe" and small.arms == ["base", "no_replay", "rod"]
    assert (small.train.steps, config.train.steps) == (10, 100)
    caps = {spec.name: spec.max_tokens for spec in small.domain.specs}
    assert caps.pop("dialect") == 900
    assert {*caps.values()} == {int(1.1 * 2 * 10 * 8 * 64)}
    config = composed(*SMALL, f"run_dir={tmp_path}", f"probe.run_dir={tmp_path}/../{tmp_path.name}")
    with pytest.raises(ValueError, match=r"probe\.run_dir=.* is the folder of the run"):
        probed(config)


def test_what_a_probe_says_is_what_its_arms_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(tmp_path / "run", "probe.price=2", "train.steps=40", "probe.steps=10")
    with made_up_training():
        probe(config)
    check(tmp_path / "run_probe", capsys.readouterr().out, steps=40, sources=2)


def check(folder: Path, printed: str, *, steps: int, sources: int) -> None:
    findings: dict[str, Any] = json.loads((folder / "probe.json").read_text())
    base = json.loads((folder / "arms" / "base" / "evaluation.json").read_text())["loss"]["replay"]
    for name in ("no_replay", "rod"):
        arm = folder / "arms" / name
        loss = json.loads((arm / "evaluation.json").read_text())["loss"]["replay"]
        forgotten = findings["forgetting_by_source"][name]
        assert forgotten == pytest.approx({o: loss[o] - base[o] for o in base})
        assert len(forgotten) == sources
        assert json.loads((arm / "arm.json").read_text())["steps"] == 10
    with Curriculum.open(folder / "arms" / "rod" / "curriculum.rod") as curriculum:
        store = BlockStore(folder / "blocks")
        shares = [float(store.is_replay(each.trained_on).mean()) for each in curriculum]
    assert findings["replay_share"] == pytest.approx({"first": shares[0], "last": shares[-1]})
    speed, whole = findings["seconds_per_step"], findings["whole_run"]
    hours = (
        steps * (speed["no_replay"] + speed["rod"]) + 2 * steps / 3 * speed["no_replay"]
    ) / 3600
    processes = whole["process_hours"] / whole["hours"]
    assert whole["hours"] == pytest.approx(hours)
    assert whole["cost"] == pytest.approx(2 * hours * processes)
    assert "Not known from this" in printed and f"{shares[0]:.0%} in the first tenth" in printed


def test_a_timing_is_of_the_recipes_shape_on_made_up_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(tmp_path / "run", "train.steps=40")
    with made_up_training():
        time(config)
    folder, printed = tmp_path / "run_time", capsys.readouterr().out
    findings = json.loads((folder / "time.json").read_text())
    assert {*findings["arms"]} == {"no_replay", "rod"} and "RoD takes" in printed
    sources = {source.name for source in BlockStore(folder / "blocks").sources}
    assert sources == {*config.domain.sources}
    for name, arm in findings["arms"].items():
        rows = [*map(json.loads, (folder / "arms" / name / "metrics.jsonl").open())]
        assert len(rows) == 13
        seconds = sorted(row["timing/train/total"] for row in rows[3:])
        assert arm["seconds_per_step"] == pytest.approx((seconds[4] + seconds[5]) / 2)
        tokens = config.train.batch_size * config.domain.block_size
        assert arm["tokens_per_second"] == pytest.approx(tokens / arm["seconds_per_step"])
        assert arm["mfu"] == pytest.approx(arm["tflops_per_process"] / findings["peak_tflops"])
