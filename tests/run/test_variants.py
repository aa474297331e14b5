"""Variants of arms: what a name stands for, and what is refused."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import yaml
from command_line import composed

from nemo_rod.config import Config, Validation
from nemo_rod.run.checks import check
from nemo_rod.run.stages import Stages
from nemo_rod.run.variants import arm_settings
from nemo_rod.selection.candidates import Candidates


@cache
def recipe(name: str = "toy") -> Config:
    return composed(f"recipe={name}")


def toy(**variants: str) -> Config:
    """The toy with more variants, each as one would type it, checked."""
    values = {name: yaml.safe_load(text) for name, text in variants.items()}
    config = dataclasses.replace(recipe(), variants=recipe().variants | values)
    check(config)
    return config


def test_a_variant_takes_every_key_it_does_not_set_from_what_it_varies():
    config = toy(
        a="{of: rod_m4, budget: 0.5, selection: {kappa: 2}, train: {lr: 1.0e-3}}",
        b="{of: a, steps: 7, scoring: {micro_batch_size: 8}}",
    )
    a, b = arm_settings(config, "a"), arm_settings(config, "b")
    assert (a.of, a.kind, a.scores) == ("rod", "trained", True)
    assert (a.selection.multiplier, a.selection.kappa, a.selection.balance) == (4, 2, "exact")
    assert (a.train.steps, a.train.lr, a.train.batch_size) == (160, 1e-3, 32)
    assert (b.train.steps, b.train.lr, b.scoring.micro_batch_size) == (7, 1e-3, 8)
    assert arm_settings(config, "rod").selection.multiplier == 2
    assert config.scoring.micro_batch_size == 32


def test_budgets():
    config = toy(half="{of: rod_m4, compute: 0.5}")
    steps = {name: arm_settings(config, name).train.steps for name in ("rod", *config.variants)}
    assert steps["rod"] == 320
    assert steps["rod_compute_matched"] == round(320 / (1 + 2 / 3))
    assert steps["rod_quarter_compute_matched"] == round(320 / (1 + 2 / 3 / 4))
    assert steps["half"] == round(0.5 * 320 / (1 + 4 / 3))
    assert steps["rod_beyond"] == 384
    assert steps["max_replay"] == 640
    paper = recipe("german_qwen3_5_9b")
    assert arm_settings(paper, "max_replay").train.steps == 5869


def test_warm_up_and_decay_in_steps():
    config = toy(
        half="{of: rod, budget: 0.5}",
        own="{of: rod, budget: 0.5, train: {decay_steps: 7}}",
        stops="{of: no_replay, budget: 4, converge: true}",
        open="{of: rod, budget: 2, train: {decay_steps: 0}}",
    )
    config.validation.every = 20
    names = ("rod", "half", "own", "stops", "open")
    train = {name: arm_settings(config, name).train for name in names}
    # shares of the arm's own steps
    assert (train["rod"].warmup, train["rod"].decay) == (16, 96)
    assert (train["half"].warmup, train["half"].decay) == (8, 48)
    assert (train["own"].warmup, train["own"].decay) == (8, 7)
    assert (train["open"].warmup, train["open"].decay) == (32, 0)
    assert (train["stops"].steps, train["stops"].warmup) == (1280, 16)
    # steps of the recipe's length, or of the variant's own
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, warmup_steps=10, decay_steps=64)
    )
    train = {name: arm_settings(config, name).train for name in train}
    assert (train["rod"].warmup, train["rod"].decay) == (10, 64)
    assert (train["half"].warmup, train["half"].decay) == (5, 32)
    assert (train["own"].warmup, train["own"].decay) == (5, 7)
    assert train["stops"].warmup == 10


def test_a_run_that_is_cut_short_keeps_a_schedule():
    train = dataclasses.replace(recipe().train, steps=7, warmup_steps=50, decay_steps=616)
    assert (train.warmup, train.decay) == (6, 7)
    # Megatron asserts that the warm-up is shorter than the whole schedule
    assert dataclasses.replace(train, warmup_steps=None, warmup_fraction=0.99).warmup == 6
    train = dataclasses.replace(train, warmup_fraction=0.1, warmup_steps=None)
    assert train.warmup == 1


def test_arms_that_a_recipe_trains_without_naming_them_are_checked():
    converging = {"no_replay": {"of": "no_replay", "converge": True}}
    other = {"other": {"of": "no_replay", "converge": True}}
    for arms, variants, name in (
        (["rod"], converging, "no_replay can converge"),
        (["merge_0.6"], converging, "no_replay can converge"),
        (["mine"], {**other, "mine": {"of": "rod", "share": "other"}}, "other can converge"),
        (["mine"], {**other, "mine": {"of": "rod", "follow": "other"}}, "other can converge"),
    ):
        config = dataclasses.replace(recipe("toy_synthetic"), arms=arms, variants=variants)
        with pytest.raises(ValueError, match=f"validation.every=0 is not valid.* {name}"):
            check(config)
        check(dataclasses.replace(config, validation=Validation(every=2)))
        check(dataclasses.replace(config, arm=arms[0]))  # it is trained by another command
        check(dataclasses.replace(config, arms=["base", "max_replay"]))  # nothing needs it


def test_a_variant_of_no_replay_needs_no_replay_either():
    config = recipe("toy_synthetic")
    sources = {k: v for k, v in config.domain.sources.items() if v["role"] == "adaptation"}
    config = dataclasses.replace(
        config,
        domain=dataclasses.replace(config.domain, sources=sources),
        model=dataclasses.replace(config.model, hf="made", architecture=None),
        pretrain=None,
        variants={"mine": {"of": "no_replay", "steps": 9}},
        arms=["mine"],
    )
    check(config)
    with pytest.raises(ValueError, match="role=replay, which max_replay trains on"):
        check(dataclasses.replace(config, arms=["mine", "max_replay"]))


def test_more_variants_than_anybody_writes_are_refused():
    for count, form, sentence in (  # any of them would take hours
        (60, "{{of: v{0}}}", "v0 has more than 50 parents"),
        (60, "{{of: rod, follow: v{0}}}", "v0 waits for more than 50 arms: v0 -> v1 -> "),
        (600, "{{of: rod, steps: {0}}}", r"arms and variants are 6\d\d, expected at most 500"),
    ):
        with pytest.raises(ValueError, match=sentence):
            toy(**{f"v{n}": form.format(n + 1) for n in range(count)})


def names(*arms: str) -> list[str]:
    config = dataclasses.replace(recipe(), arms=list(arms))
    return [stage.name for stage in Stages(config).models()]


def test_stages_are_those_that_the_variants_need_in_order():
    reference = ["prepare", "base", "references_base"]
    select = ["no_replay", "references_specialist"]
    assert names("control_share") == [*reference, *select, "rod", "control_share"]
    assert names("rho_rho", "rod") == [*reference, *select, "rod", "rho_rho"]
    assert names("max_replay") == ["prepare", "base", "max_replay"]


NEWEST = """
class Newest:
    needs = frozenset()

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def select(self, pool, score_C, k):
        return sorted(sorted(range(len(pool.block_ids)), key=lambda i: -pool.block_ids[i])[:k])
"""


@pytest.mark.parametrize(
    "words", ["selection.kappa=2", "selection.policy=schedule +selection.policy_options.replay=0.2"]
)
def test_a_variant_with_another_policy_has_the_options_of_its_own_alone(words):
    config = composed("recipe=toy", *words.split())  # rod_mix is one of its arms
    rod, mix, averages = (arm_settings(config, n) for n in ("rod", "rod_mix", "rod_averages"))
    assert (rod.selection.kappa, mix.selection.kappa) == (config.selection.kappa, 1.0)
    assert rod.selection.policy_options == config.selection.policy_options
    assert mix.selection.policy_options == {}
    assert averages.selection.policy_options == {"target": "specialist"}


@pytest.mark.parametrize(
    ("selection", "needed"),
    [
        ("{policy: odm}", []),
        ("{policy: mix}", ["base"]),
        ("{policy: mix, policy_options: {target: specialist}}", ["base", "specialist"]),
        ("{policy: schedule, policy_options: {replay: 0.2}}", []),
        ("{policy: FILE:Newest, policy_options: {offset: 3}}", []),
        ("{policy: FILE:Losses}", []),
        (
            "{policy: fixed_share, policy_options: {share: 0.3, replay: rho}}",
            ["base", "specialist"],
        ),
        ("{score: FILE:own_loss}", []),
        ("{kappa: 2}", ["base", "specialist"]),
    ],
)
def test_what_a_recipe_runs_follows_from_what_its_policies_need(selection, needed, tmp_path):
    """References, and with them a specialist, are made for a policy that compares losses alone."""
    file = tmp_path / "mine.py"
    losses = "class Losses(Newest):\n    needs = frozenset({'losses'})\n"
    score = "def own_loss(loss_C, reference_C):\n    return loss_C\nown_loss.needs = {'losses'}\n"
    file.write_text(NEWEST + losses + score)
    text = selection.replace("FILE", str(file))
    config = dataclasses.replace(toy(mine=f"{{of: rod, selection: {text}}}"), arms=["mine"])
    made = ["references_base", "no_replay", "references_specialist"][: 2 * len(needed) - 1]
    stages = ["prepare", "base", *(made if needed else []), "mine"]
    check(config)
    assert [stage.name for stage in Stages(config).models()] == stages
    settings = arm_settings(config, "mine")
    chooses_by_losses = needed and "mix" not in text
    assert settings.scores == bool(chooses_by_losses or "Losses" in text or "own_loss" in text)
    blocks = {"num_adaptation": 300, "num_replay": 300, "digest": ""}
    in_role = np.split(Stages(config).jobs.reference_mask(blocks), [300])
    assert [bool(part.any()) for part in in_role] == ["specialist" in needed, "base" in needed]
    before = settings.planned_arm.inputs()
    file.write_text(file.read_text() + "\n# another version\n")
    assert (settings.planned_arm.inputs() == before) == ("FILE" not in selection)


def test_a_part_in_a_file_is_named_in_what_is_refused(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import nosuch\n")
    sentence = r"selection.policy=.*broken.py:Any cannot be imported \(ModuleNotFound"
    config = toy(mine=f"{{of: rod, selection: {{policy: '{file}:Any'}}}}")
    with pytest.raises(ValueError, match=sentence):
        check(dataclasses.replace(config, arms=["mine"]))


def test_half_the_retention_keeps_half_of_the_blocks_of_replay():
    config = toy(some="{of: fixed_20, retention: 0.5}")
    blocks = {"num_adaptation": 100, "num_replay": 300, "digest": ""}
    pools = Stages(config).jobs.arm("some", blocks).pools()
    assert isinstance(pools, Candidates)
    assert (pools.num_kept_replay, pools.epoch_size) == (150, 250)
