"""Controls: which a recipe has, which shares are tried, and that a kill changes nothing."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import made_up_run
import numpy as np
import pytest
from command_line import composed
from made_up_run import made_up_training, recipe
from safetensors.numpy import load_file

from nemo_rod.commands import run_stages
from nemo_rod.corpus import BlockStore
from nemo_rod.jobs import EvaluateJob
from nemo_rod.lab import controls
from nemo_rod.lab.plan.work import stage_works
from nemo_rod.lab.report.build_report import judged_results
from nemo_rod.lab.report.run_files import read_run
from nemo_rod.run.handover import Stage
from nemo_rod.run.run_folder import RunFolder
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import arm_settings
from nemo_rod.selection import Curriculum, replay_share

LONG = ("train.steps=40", "report.smoke_test=false")
COUNTS = dict.fromkeys(("num_adaptation", "num_replay", "held_adaptation", "held_replay"), 500)
LIKE_ROD = ["fixed_like_rod", "schedule_like_rod"]
SHAPE: Any = SimpleNamespace(parameters=1)


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("recipe=toy", LIKE_ROD),
        ("recipe=toy report.max_controls=0", []),
        ("recipe=toy arms=[base,rod,random_random]", ["schedule_like_rod"]),  # has the other
        ("recipe=toy_paper", []),
        ("recipe=toy arms=[base,no_replay,fixed_32]", []),
        ("recipe=toy_synthetic", []),  # too small to judge by
    ],
)
def test_recipes_with_rod_have_controls_of_themselves(words, added):
    with_none = composed(*words.split(), "report.max_controls=0").arms
    assert composed(*words.split()).arms == [*with_none, *added]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("", 320 * (1 + 2 / 3 + 1 + 2 / 3)),  # training, scoring, specialist, both references
        ("selection.multiplier=4", 320 * (1 + 4 / 3 + 1 + 4 / 3)),
        ("selection.policy=mix +selection.policy_options.target=specialist", 320 * (1 + 1 + 2 / 3)),
    ],
)
def test_fixed_replay_is_trained_for_as_long_as_rod_costs_in_all(words, steps):
    config = composed("recipe=toy", "arms=[base,rod,fixed_32_total]", *words.split())
    settings = arm_settings(config, "fixed_32_total")
    assert (settings.train.steps, settings.of) == (round(steps), "fixed_32")


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_a_control_finds_enough_blocks_of_each_role_at_any_share(share):
    words = ("train.batch_size=32", "selection.balance=expected", "selection.multiplier=1.5")
    settings = arm_settings(composed("recipe=toy", *words), "fixed_like_rod")
    arm = settings.arm(num_adaptation=500, num_replay=900, seed=1, share=share)
    pools, policy = arm.pools(), arm.policy()
    for step in range(50):
        pool = pools.pool(step)
        chosen = policy.select(pool, None, arm.batch_size)
        assert pool.is_replay_C[chosen].sum() == round(32 * share)


@pytest.mark.parametrize(
    ("name", "of", "changed"),
    [
        ("lower_lr_3", "no_replay", {"lr": 3e-4 / 3}),
        ("fixed_20_lower_lr_2", "fixed_20", {"lr": 3e-4 / 2}),
        ("l2_base_1e-3", "no_replay", {"terms": {"l2_base": 1e-3}}),
        ("fixed_8_kl_base_0.5", "fixed_8", {"terms": {"kl_base": 0.5}}),
        ("rod_mix_kl_base_1", "rod", {"terms": {"kl_base": 1}}),
        ("sfa_80", "no_replay", {"terms": {"sfa": 80}}),
        ("fixed_8_lora_32", "fixed_8", {"terms": {"lora": 32}}),
    ],
)
def test_names_of_parts_are_arms(name, of, changed):
    varied = composed("recipe=toy", f"+variants.mine={{of: {name}, steps: 7}}", "arms=[base,mine]")
    assert arm_settings(varied, "mine").of == of and varied.arms == ["base", "mine"]
    config = composed("recipe=toy", f"arms=[base,rod,{name}_merge_0.8]")
    settings = arm_settings(config, name)
    assert settings.of == of
    assert settings.train == dataclasses.replace(config.train, **changed)
    merged = next(s for s in Stages(config).all() if s.name == f"{name}_merge_0.8")
    assert merged.needs == ("base", name)


def test_what_another_run_has_learned_is_added_to_an_instruct_model(tmp_path):
    plain, tuned, write = tmp_path / "plain", tmp_path / "tuned", made_up_run._write_weights
    words = ("arms=[base,no_replay,residual]", f"residual.run={plain}", "report.smoke_test=true")
    with made_up_training():
        run_stages.run(recipe(plain, "arms=[base,no_replay]"))
        with patch.object(made_up_run, "_write_weights", lambda f, value: write(f, value + 100)):
            run_stages.run(config := recipe(tuned, *words))
    for weights in load_file(tuned / "arms" / "residual" / "hf" / "model.safetensors").values():
        assert (weights == 104 + (9 - 4)).all()
    results = json.loads((tuned / "report" / "results.json").read_text())["arms"]
    keys = ("compute", "compute_in_all", "trained_tokens")
    costs = [[results[name][key] for key in keys] for name in ("residual", "no_replay")]
    assert costs[0] == costs[1] and None not in costs[0]
    assert results["residual"]["adapt_loss"] is not None
    assert "residual" in {w.name for w in stage_works(Stages(config), SHAPE, COUNTS)}
    blocks, digest = plain / "blocks" / "manifest.json", RunFolder(plain, "x").block_counts()
    blocks.write_text(blocks.read_text().replace(digest["digest"], "y"))
    stage = next(s for s in Stages(config).all() if s.name == "residual")
    with pytest.raises(ValueError, match=r"plain was trained on other blocks \(y\) than those of"):
        stage.is_done()


def test_a_plan_counts_the_blocks_that_the_base_reads_again():
    config = composed("recipe=toy", "arms=[fixed_8,fixed_8_kl_base_1]")
    works = {w.name: w.read for w in stage_works(Stages(config), SHAPE, COUNTS)}
    assert works["fixed_8"] == 0
    assert works["fixed_8_kl_base_1"] == round(0.08 * config.train.steps * 32)


class World:
    """Models whose losses follow from their replay, in place of `made_up_run`'s."""

    def __init__(self, forgotten: float, rod: tuple[float, float]) -> None:
        self.forgotten, self.rod = forgotten, rod  # of no replay; of rod: loss, forgetting

    def evaluate(self, job: EvaluateJob, folder: Path) -> None:
        store = BlockStore(job.blocks, "holdout")
        for name, model in job.models.items():
            share = 0.0
            if (file := Path(model).parent / "curriculum.rod").exists():
                with Curriculum.open(file, read_only=True) as curriculum:
                    share = replay_share(curriculum)
            levels = {"adaptation": 1 - 0.3 * np.log(1.0001 - share), "replay": 0.0}
            levels["replay"] = self.forgotten * np.exp(-6 * share)
            if name == "base":
                levels = {"adaptation": 2.0, "replay": 0.0}
            if name == "rod":
                levels = dict(zip(("adaptation", "replay"), self.rod, strict=True))
            loss = [np.float32(1 + levels[s.role]) for s in store.sources]
            result: dict[str, dict[str, Any]] = {"loss": {}, "blocks": {}}
            for source, value in zip(store.sources, loss, strict=True):
                result["loss"].setdefault(source.role, {})[source.name] = float(value)
                result["blocks"].setdefault(source.role, {})[source.name] = source.count
            np.save(folder / f"{name}.npy", np.repeat(loss, [s.count for s in store.sources]))
            (folder / f"{name}.json").write_text(json.dumps(result))


def train(run_dir: Path, world: World, monkeypatch: pytest.MonkeyPatch, *more: str) -> Stage:
    """Runs the stages of a recipe up to that of the controls, which it returns."""
    config = recipe(run_dir, *LONG, *more)
    monkeypatch.setattr(made_up_run, "_evaluate", world.evaluate)
    with made_up_training():
        for stage in Stages(config).all()[:-1]:
            if not stage.is_done():
                stage.run()
    assert stage.name == "controls" and stage.is_done()
    return stage


def outcome(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    made = json.loads((run_dir / "controls" / "manifest.json").read_text())["outputs"]
    return made, judged_results(read_run(run_dir))["verdict"]


def test_shares_are_tried_until_two_near_ones_enclose_rod_and_a_kill_changes_nothing(
    tmp_path, monkeypatch, capsys
):
    world = World(0.5, rod=(1.1, 0.04))  # as little as fixed_42, though its own share is a half
    stage = train(tmp_path / "whole", world, monkeypatch)
    made, verdict = outcome(tmp_path / "whole")
    assert verdict["says"] != "not_judged" and verdict["against"] == "fixed_like_rod"
    assert 1 <= len(made["arms"]) <= 3 and "which are near" in made["why"]
    assert {*verdict["frontier"]["between"]} & {*made["arms"]}
    assert f"{made['arms'][0]} is next" in capsys.readouterr().err

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    draw = made_up_run._Random
    for where, name, kill in (
        (controls, "_train", killed),  # a share is decided on
        (made_up_run, "_Random", lambda step: killed() if step == 20 else draw(step)),
        (world, "evaluate", killed),  # it is trained, and not measured
    ):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(where, name, kill)
            train(tmp_path / "killed", world, monkeypatch)
        begun = tmp_path / "killed" / "arms" / f"{made['arms'][0]}.partial" / "curriculum.rod"
        assert begun.exists() == (name == "_Random")
        stages = Stages(recipe(tmp_path / "killed", *LONG)).all()  # as `nemo-rod status` shows them
        assert made["arms"][0] in [stage.name for stage in stages]
    train(tmp_path / "killed", world, monkeypatch)
    assert outcome(tmp_path / "killed") == (made, verdict)
    for name in made["arms"]:
        files = (tmp_path / run_dir / "arms" / name / "curriculum.rod" for run_dir in
                 ("whole", "killed"))  # fmt: skip
        first, second = (file.read_bytes() for file in files)
        assert first == second
    assert stage.is_done()


@pytest.mark.parametrize(
    ("world", "most", "why"),
    [
        (World(0.0, (1.1, 0.0)), 3, "nothing was forgotten without replay (0.000 nats)"),
        (World(0.5, (1.1, 0.9)), 3, "every fixed share forgot less than RoD"),
        (World(0.5, (1.1, -0.1)), 1, "every fixed share forgot more than RoD; 1 shares were tried"),
    ],
)
def test_no_more_shares_are_tried_than_can_tell(tmp_path, monkeypatch, world, most, why):
    train(tmp_path, world, monkeypatch, f"report.max_controls={most}")
    made, _ = outcome(tmp_path)
    assert (made["why"], len(made["arms"])) == (why, most % 3)
