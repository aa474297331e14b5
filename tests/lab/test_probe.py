"""`nemo-rod probe`: three short arms of a recipe, and what they say about a whole run."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import composed
from made_up_run import made_up_training, recipe

from nemo_rod.commands import run_stages
from nemo_rod.corpus import BlockStore
from nemo_rod.files import read_lines
from nemo_rod.lab.plan.work import corpus_blocks
from nemo_rod.lab.rehearsal.probe import (
    ARMS,
    OLD_TEXT,
    _reference_steps,
    knowledge,
    probe,
    probe_config,
)
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.run.stages import Stages
from nemo_rod.selection import Curriculum

SMALL = (
    *("recipe=toy_synthetic", "parallel=single", "domain.block_size=64", "pretrain.steps=20"),
    *("train.batch_size=8", "train.micro_batch_size=8", "probe.steps=10"),
)


def test_a_probe_is_the_recipe_cut_short(tmp_path):
    config = composed(*SMALL, f"run_dir={tmp_path}/run", "+domain.sources.dialect.max_tokens=900")
    small = probe_config(config)
    assert small.run_dir == f"{tmp_path}/run_probe" and small.arms == ARMS
    assert (small.train.steps, config.train.steps) == (10, 100)
    caps = {spec.name: spec.max_tokens for spec in small.domain.specs}
    assert caps.pop("dialect") == 900
    assert {*caps.values()} == {int(1.1 * 2 * 10 * 8 * 64)}
    config = composed(*SMALL, f"run_dir={tmp_path}", f"probe.run_dir={tmp_path}/../{tmp_path.name}")
    with pytest.raises(ValueError, match=r"probe\.run_dir=.* is the folder of the run"):
        probe_config(config)


def test_what_a_probe_says_is_what_its_arms_measured(tmp_path, capsys):
    config = recipe(tmp_path / "run", "probe.price=2", "train.steps=40", "probe.steps=10")
    with made_up_training():
        probe(config)
    check(tmp_path / "run_probe", capsys.readouterr().out, steps=40, sources=2, references=80)


def test_a_whole_run_reads_every_reference_once(tmp_path):
    """However often its blocks are drawn: the made-up text has few."""
    config = recipe(tmp_path / "run", "train.steps=4000", "selection.balance=exact")
    blocks = corpus_blocks(Stages(config))
    found = _reference_steps(config)
    assert found == pytest.approx((blocks["num_adaptation"] + blocks["num_replay"]) / 3 / 8)


def test_a_recipe_of_three_steps_is_probed_too(tmp_path, capsys):
    config = recipe(tmp_path / "run", "train.steps=3", "checkpoint.every=1")
    with made_up_training():
        probe(config)
    found = json.loads((tmp_path / "run_probe" / "probe.json").read_text())
    metrics = read_lines(tmp_path / "run_probe" / "arms" / "rod" / "metrics.jsonl")
    shares = [row["rod/replay_share"] for row in metrics]
    assert found["replay_share"] == {"first": shares[0], "last": shares[2]}
    assert found["speed"]["rod"]["seconds_per_step"] == 0.5
    assert f"RoD chose: {shares[0]:.0%} in the first step," in capsys.readouterr().out


def check(folder: Path, printed: str, *, steps: int, sources: int, references: float) -> None:
    findings: dict[str, Any] = json.loads((folder / "probe.json").read_text())
    base = json.loads((folder / "arms" / "base" / "evaluation.json").read_text())["loss"]["replay"]
    for name in ARMS[1:]:
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
    plain, rod = (findings["speed"][name] for name in ("no_replay", "rod"))
    speed, whole = (plain["seconds_per_step"], rod["seconds_per_step"]), findings["whole_run"]
    assert plain["tokens_per_second"] == pytest.approx(8 * 16 / speed[0])
    assert rod["mfu"] == pytest.approx(rod["tflops_per_process"] / findings["peak_tflops"])
    hours = (steps * sum(speed) + references / 3 * speed[0]) / 3600
    processes = whole["process_hours"] / whole["hours"]
    assert whole["hours"] == pytest.approx(hours)
    assert whole["cost"] == pytest.approx(2 * hours * processes)
    assert {row["known"] for row in findings["known"].values()} == {None}  # nothing was learned
    assert "not judged" in printed and "raise probe.steps" in printed
    assert "Not known from this" in printed and f"{shares[0]:.0%} in the first tenth" in printed


@pytest.mark.parametrize(
    ("gained", "changes", "verdicts"),
    [
        # half of the blocks each; new text gains 0.4 nats in all, and as shown after five steps
        (0.4, [-0.074, -0.076], [True, False]),
        (0.149, [-0.01, 0.1], [None, None]),  # 0.049 after five: new text itself is not learned
    ],
)
def test_a_source_is_known_that_gains_little(gained, changes, verdicts, tmp_path):
    config = recipe(tmp_path / "run", "train.steps=40", "probe.steps=10")
    with made_up_training():
        run_stages.run(small := probe_config(config))
    file = Path(small.run_dir) / "arms" / "no_replay" / "metrics.jsonl"
    rows = [*map(json.loads, file.open())]
    for step, loss in ((4, 2.1), (9, 2.0)):
        rows[step]["validation/adaptation/dialect/loss"] = loss
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, sources = read_run(Path(small.run_dir)), ["chain_0", "chain_1"]
    history = run.arms[OLD_TEXT].history
    assert history is not None
    assert history.share_T.tolist() == [1.0] * 10  # it trains on replay alone
    history.chosen_BO[:] = 0
    history.chosen_BO[0, 1:] = 40
    found = knowledge(run, gained, dict(zip(sources, changes, strict=True)))
    assert [found[name]["steps"] for name in sources] == [5, 5]
    assert found["chain_0"]["limit"] == pytest.approx((gained - 0.1) / 4)
    assert [found[name]["known"] for name in sources] == verdicts
