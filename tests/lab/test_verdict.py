"""The verdict: against fixed replay at RoD's share, its forgetting and its cost; how sure it is."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT

from nemo_rod.lab.report.run_files import Arm, Run
from nemo_rod.lab.report.verdict import _t90, across_seeds, advice, search, sentences, verdict_of
from nemo_rod.selection.arm_names import parse_arm

BLOCKS, SD = 200, 0.3
FIXED = {"adaptation": "random", "replay": "random", "share": None}
Outcome = tuple[float, float, float]  # replay share, adaptation loss, signed forgetting


def made_up(
    outcomes: dict[str, Outcome], *, noise: float = 0.02, num_blocks: int = BLOCKS, seed: int = 0
) -> tuple[Run, dict[str, Any]]:
    """A run with these true results, on blocks that are alike for all arms but for noise."""
    rng, arms, results = np.random.default_rng(seed), dict[str, Arm](), dict[str, Any]()
    blocks = {role: rng.normal(3, SD, num_blocks) for role in ("adaptation", "replay")}
    for name, (share, loss, forgetting) in {"base": (0.0, 3.0, 0.0), **outcomes}.items():
        levels = {"adaptation": loss - 3, "replay": forgetting}
        losses = {
            role: {"s": blocks[role] + level + rng.normal(0, noise, num_blocks)}
            for role, level in levels.items()
        }
        arms[name] = Arm(
            name=parse_arm(name), seed=1, loss={}, tasks=None, blocks=None, facts={}, history=None,
            block_losses=losses,
        )  # fmt: skip
        rise = float((losses["replay"]["s"] - arms["base"].block_losses["replay"]["s"]).mean())
        design = None if name == "base" else {"of": name, **FIXED}
        if name == "fixed_like_rod":
            design = {"of": "rod", **FIXED, "share": share}
        cost = 3.3 if name == "rod" else 1.0
        results[name] = {
            "adapt_loss": float(losses["adaptation"]["s"].mean()), "signed_forgetting": rise,
            "val_forgetting": max(0.0, rise), "replay_share": share, "trained_tokens": 1000,
            "compute": 1.0, "compute_in_all": cost, "design": design,
        }  # fmt: skip
    counts = {"adaptation": {"s": 10}, "replay": {"s": 10}}
    return Run(Path("run"), "mine", arms, counts, (), [], counts), {
        "arms": results,
        "early_stops": {},
    }


def told(outcomes: dict[str, Outcome], **options: Any) -> dict[str, Any]:
    verdict = across_seeds([verdict_of(*made_up(outcomes, **options))])
    assert verdict is not None
    return verdict


PLAIN: dict[str, Outcome] = {
    "no_replay": (0.0, 2.0, 0.5), "fixed_20": (0.2, 2.1, 0.1), "rod": (0.2, 2.05, 0.05),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says", "advised"),
    [
        ({}, "better", "Take RoD: it is better than fixed 20 %."),
        ({"rod": (0.2, 2.2, 0.2)}, "worse", "Take fixed 20 %: RoD is not better here."),
        ({"rod": (0.2, 2.2, 0.0)}, "trade", "A trade: RoD forgets less and learns less than"),
        ({"rod": (0.2, 2.0, 0.2)}, "trade", "A trade: RoD learns more and forgets more than"),
        ({"rod": (0.2, 2.1, 0.1)}, "not_judged", "RoD and fixed 20 % cannot be told apart"),
        ({"rod": (0.08, 2.0, 0.1)}, "not_judged", "Train fixed_like_rod, fixed replay at RoD's"),
        (
            {"rod": (0.08, 2.0, 0.1), "fixed_like_rod": (0.08, 2.05, 0.3)},
            "better",
            "Take RoD: it is better than fixed like RoD.",
        ),
        (
            {"rod": (0.08, 2.0, 0.1), "fixed_like_rod": (0.0, 2.05, 0.3)},  # of batches of 6
            "not_judged",
            "Train fixed_8: in batches this small, whole blocks of replay bring fixed_like_rod no",
        ),
        ({"no_replay": (0.0, 2.0, 0.0)}, "better", "Nothing was forgotten even without replay"),
    ],
)
def test_rod_is_judged_against_fixed_replay_at_its_own_share(change, says, advised):
    verdict = told(PLAIN | change, seed=2)  # one draw in five tells equal arms apart
    assert verdict["says"] == says and verdict["advice"].startswith(advised)
    assert verdict["seeds"] == 1
    text = " ".join(sentences(verdict))
    assert (verdict["difference"] is None) == ("Against" not in text)


def test_a_user_is_told_in_numbers():
    first, frontier, cost, shown = sentences(told(PLAIN))
    assert first.startswith("Against fixed 20 % (+0.0 points of replay): better in both. RoD learn")
    assert "0.05" in first and "more and forgot 0.05" in first and first.endswith("less.")
    assert frontier == "At RoD's own forgetting: not judged, every fixed share forgot more than " \
        "RoD: run fixed_26."  # fmt: skip
    assert re.fullmatch(
        r"The smallest difference that these held-out blocks show is 0\.003\d nats in what was "
        r"learned and 0\.003\d in what was forgotten\.", shown,
    )  # fmt: skip
    assert cost.endswith("no fixed share was trained for as long as RoD costs, 3.30 plain runs.")


RAW = ROOT / "docs" / "research"


@pytest.mark.parametrize(
    "file", [*sorted(RAW.glob("controls/*.json")), *sorted(RAW.glob("budgets/*.json"))],
    ids=lambda file: f"{file.parent.name} {file.stem}",
)  # fmt: skip
def test_a_measured_fixed_share_is_not_said_to_beat_its_neighbours(file):
    """Each lies below the line between them, by as much as RoD was once praised for."""
    measured = json.loads(file.read_text())["arms"]
    plain = {name: arm for name, arm in measured.items() if re.fullmatch(r"no_.*|fixed_\d+", name)}
    assert len(plain) >= 4
    for left_out in set(plain) - {"no_replay"}:
        arms = {name if name != left_out else "rod": arm for name, arm in plain.items()}
        for name, arm in arms.items():
            level = {"signed_forgetting": arm["val_forgetting"], "trained_tokens": 1}
            arms[name] = {**arm, **level, "design": {"of": name, **FIXED}}
        found = search(arms)
        assert found.between is None
        assert re.search("points apart|every fixed share forgot", found.why)


def test_between_near_shares_the_gain_is_the_distance_from_their_line():
    near = {"fixed_40": (0.4, 1.743, 0.16), "fixed_45": (0.45, 1.767, 0.145)}
    verdict = told({**near, "no_replay": (0.0, 1.6, 0.86), "rod": (0.4, 1.735, 0.152)}, noise=0.0)
    part = np.log(0.16 / 0.152) / np.log(0.16 / 0.145)
    expected = 1.743 + part * (1.767 - 1.743) - 1.735
    assert verdict["frontier"]["between"] == ["fixed_40", "fixed_45"]
    assert verdict["frontier"]["difference"]["value"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("cost", "told_first"),
    [
        (3.3, "At equal cost in all, against fixed 20 %, at RoD's cost in all: RoD learned 0.3"),
        (4.0, "At 1.21 times the cost in all, against fixed 20 %, at RoD's cost in all: RoD learn"),
        (None, "At equal cost in all: not judged, no fixed share was trained for as long as RoD "),
    ],
)
def test_fixed_replay_that_was_trained_for_longer(cost, told_first):
    run, results = made_up(PLAIN | {"fixed_20_total": (0.2, 1.7, 0.1)})
    results["arms"]["fixed_20_total"] |= {"compute_in_all": cost, "trained_tokens": 3300}
    results["arms"]["fixed_20_total"]["design"]["of"] = "fixed_20"
    verdict = across_seeds([verdict_of(run, results)])
    assert verdict is not None and verdict["against"] == "fixed_20"
    assert sentences(verdict)[2].startswith(told_first)


def test_what_one_would_do_instead_is_compared_and_is_no_fixed_replay():
    """A lower rate at RoD's very share does not stand for fixed replay there."""
    others: dict[str, Outcome] = {
        "fixed_20_lower_lr_3": (0.2, 2.3, 0.02), "fixed_20_merge_0.8": (0.2, 2.15, 0.08),
        "no_replay_l2_base_1": (0.0, 2.3, 0.2),
    }  # fmt: skip
    run, results = made_up({**PLAIN, **others})
    for name in others:
        design = {"of": name.partition("_lower")[0], **FIXED, "train": {"lr": 1e-4}}
        results["arms"][name]["design"] = None if "merge" in name else design
    results["arms"]["no_replay_l2_base_1"]["design"]["of"] = "no_replay"
    verdict = across_seeds([verdict_of(run, results)] * 2)
    assert verdict is not None and verdict["against"] == "fixed_20"
    assert verdict["alternatives"].keys() == others.keys()
    text = sentences(verdict)
    assert text[3].startswith("Against fixed 20 lower lr 3: a trade. RoD learned 0.25")
    assert text[4].startswith("Against fixed 20 %, merge 0.8: better in both. RoD learned 0.1")
    assert text[5].startswith("Against no replay l2 base 1: better in both. RoD learned 0.2")
    assert verdict["frontier"]["between"] == []


def test_an_early_stop_is_compared_where_it_had_forgotten_as_much():
    run, results = made_up(PLAIN)
    stops = {
        name: [
            {"step": step, "adapt_loss": loss, "signed_forgetting": forgotten}
            for step, loss, forgotten in rows
        ]
        for name, rows in {
            "no_replay": [(10.0, 2.4, 0.02), (20.0, 2.2, 0.06), (40.0, 2.0, 0.5)],
            "fixed_20": [(10.0, 2.5, 0.01), (40.0, 2.1, 0.04)],  # never forgot as much
            "rod": [(10.0, 2.5, 0.01), (40.0, 2.05, 0.05)],
        }.items()
    }
    verdict = across_seeds([verdict_of(run, {**results, "early_stops": stops})])
    assert verdict is not None and [*verdict["early_stops"]] == ["no_replay"]
    assert verdict["early_stops"]["no_replay"] == pytest.approx(
        {"value": 2.25 - 2.05, "low": None, "high": None, "step": 17.5, "steps": 40}
    )
    assert sentences(verdict)[3] == (
        "Against no replay stopped early, where it had forgotten as much (step 18 of 40, its rate "
        "not yet lowered): RoD learned 0.2000 nats more, on the first held-out blocks."
    )


def test_nine_in_ten_intervals_hold_the_true_difference():
    inside = 0
    for seed in range(200):
        difference = told(PLAIN, noise=0.1, num_blocks=60, seed=seed)["difference"]
        interval = difference["adaptation"]
        inside += interval["low"] <= 0.05 <= interval["high"]
    assert 0.87 <= inside / 200 <= 0.93


def test_too_few_blocks_are_said_to_be_too_few():
    verdict = told(PLAIN, noise=0.3, num_blocks=8)
    assert verdict["says"] == "not_judged"
    assert re.fullmatch(
        r"RoD and fixed 20 % cannot be told apart: differences below 0\.3\d\d nats are chance\. "
        r"Hold out more blocks, or train other seeds, to tell smaller ones\.", verdict["advice"],
    )  # fmt: skip


def test_over_seeds_the_interval_is_students():
    verdicts = [verdict_of(*made_up(PLAIN, noise=0.0, seed=s)) for s in range(3)]
    for verdict, gain in zip(verdicts, (0.01, 0.02, 0.03), strict=True):
        assert verdict is not None
        verdict["difference"]["adaptation"]["value"] = gain
    merged = across_seeds(verdicts)
    assert merged is not None and merged["seeds"] == 3
    half = 2.920 * 0.01 / np.sqrt(3)
    expected = {"value": 0.02, "low": 0.02 - half, "high": 0.02 + half}
    assert merged["difference"]["adaptation"] == pytest.approx(expected)
    assert "Take RoD" in advice(merged)


def test_every_comparison_is_over_the_seeds_or_says_that_it_is_not():
    near = PLAIN | {"fixed_22": (0.22, 2.11, 0.04), "fixed_20_total": (0.2, 1.7, 0.1),
                    "fixed_20_merge_0.8": (0.2, 2.15, 0.08)}  # fmt: skip
    verdicts = []
    for seed in range(3):
        run, results = made_up(near, seed=seed)
        results["arms"]["fixed_20_total"] |= {"compute_in_all": 3.3, "trained_tokens": 3300}
        results["arms"]["fixed_20_total"]["design"]["of"] = "fixed_20"
        results["arms"]["fixed_20_merge_0.8"]["design"] = None
        stops = [{"step": s, "adapt_loss": a, "signed_forgetting": f} for s, a, f in
                 ((10.0, 2.4, 0.0), (20.0 + 6 * seed, 2.2 - 0.1 * seed, 0.5))]  # fmt: skip
        rod = [{"step": 40.0, "adapt_loss": 2.0, "signed_forgetting": 0.25}]
        verdicts.append(
            verdict_of(run, {**results, "early_stops": {"no_replay": stops, "rod": rod}})
        )
    one, merged = (across_seeds(some) for some in (verdicts[:1], verdicts))
    assert one is not None and merged is not None and one["first_alone"] == []

    def flat(verdict: Any) -> list[dict[str, float]]:
        of = verdict["frontier"], verdict["total_cost"]["difference"], verdict["alternatives"]
        differences = [of[0]["difference"], *of[1].values(), *of[2]["fixed_20_merge_0.8"].values()]
        return [*differences, verdict["early_stops"]["no_replay"]]

    for place, mean in enumerate(flat(merged)):
        each = [flat(verdict)[place]["value"] for verdict in verdicts]
        half = 2.920 * np.std(each, ddof=1) / np.sqrt(3)
        assert (mean["value"], mean["high"]) == pytest.approx((np.mean(each), np.mean(each) + half))
    assert merged["early_stops"]["no_replay"]["step"] == pytest.approx(18)
    assert "first seed alone" not in " ".join(sentences(merged)) and merged["first_alone"] == []
    verdicts[2]["frontier"] |= {"between": ["no_replay", "fixed_20"]}
    verdicts[2]["total_cost"] |= {"against": None, "difference": None}
    verdicts[2]["early_stops"] = verdicts[2]["alternatives"] = {}
    merged = across_seeds(verdicts)
    assert merged is not None and flat(merged) == flat(one)
    assert [" (of the first seed alone): " in line for line in sentences(merged)] == [
        False, True, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "freedom, t", [(1, 6.314), (9, 1.833), (10, 1.812), (11, 1.796), (29, 1.699)]
)
def test_students_t(freedom, t):
    assert _t90(freedom) == pytest.approx(t, abs=6e-4)


def test_fixed_replay_that_repeats_few_blocks_is_named():
    """RoD draws from all replay; nothing is said of a fixed arm that went as often through it."""
    run, results = made_up({**PLAIN, "fixed_22": (0.22, 2.11, 0.04)})
    for passes, is_named in ((2.0, False), (12.0, True)):
        results["arms"]["fixed_20"]["replay_passes"] = passes
        verdict = across_seeds([verdict_of(run, results)])
        assert verdict is not None and verdict["frontier"]["between"] == ["fixed_20", "fixed_22"]
        said = [line for line in sentences(verdict) if line.startswith("There, fixed 20 % went 12")]
        assert bool(said) == is_named
