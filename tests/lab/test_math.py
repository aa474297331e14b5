"""Names, colours, chord, fits, labels and histories of the report, by hand and against NumPy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_build import create

from nemo_rod.lab.history import History, read_history
from nemo_rod.lab.report.chord import chord_at, chord_through, linear_fit, outlier, pearson
from nemo_rod.lab.report.designs import continued_arms, helped_arms, varying, with_fixed_share
from nemo_rod.lab.report.figures.over_steps import passes
from nemo_rod.lab.report.results import profiles_of
from nemo_rod.lab.report.style import COLOURS, arm_colour
from nemo_rod.selection import Choice, Curriculum, Pool, SourceRow
from nemo_rod.selection.arm_names import parse_arm

SOURCES = (
    SourceRow("legal", "adaptation", 0, 10),
    SourceRow("code", "replay", 10, 5),
    SourceRow("web", "replay", 15, 5),
)


@pytest.mark.parametrize(
    ("name", "kind", "value", "label"),
    [
        ("base", "base", 0, "base"), ("no_replay", "no_replay", 0, "no replay"),
        ("fixed_32", "fixed", 32, "fixed 32 %"), ("fixed_12.5", "fixed", 12.5, "fixed 12.5 %"),
        ("merge_0.6", "merge", 0.6, "merge 0.6"),
        ("merge_1", "merge", 1, "merge 1"), ("max_replay", "max_replay", 0, "max replay"),
        ("rod", "rod", 0, "RoD"), ("rod_compute_matched", "rod_variant", 0, "RoD compute matched"),
        ("fixed_share_rho", "other", 0, "fixed share rho"),
        ("fixed_20_converged", "other", 0, "fixed 20 %, converged"),
    ],
)  # fmt: skip
def test_arm_names(name, kind, value, label):
    arm = parse_arm(name)
    assert (arm.kind, arm.value, arm.label) == (kind, value, label)


def test_arms_are_listed_from_the_base_to_rod():
    names = ["rod_x", "rod", "merge_0.8", "merge_0.2", "fixed_95", "fixed_20", "no_replay", "base"]
    assert sorted(names, key=lambda name: parse_arm(name).order) == [
        "base", "no_replay", "fixed_20", "fixed_95", "merge_0.2", "merge_0.8", "rod", "rod_x",
    ]  # fmt: skip


def test_roles_and_fixed_arms_have_different_colours():
    for colours in zip(*COLOURS.values(), strict=True):
        assert len(set(colours)) == len(colours)
    arms = [f"fixed_{percent}" for percent in (10, 20, 32, 50)]
    assert len({arm_colour(arm, arms) for arm in arms}) == 4


# Straight in ln F by construction: 1.9 at F = 1, .1 more for every halving.
STRAIGHT = [(2.0**-k, 1.9 + 0.1 * k) for k in range(4)]


@given(
    points=st.dictionaries(st.floats(1e-4, 10), st.floats(0, 10), min_size=2, max_size=6).filter(
        lambda d: min(np.diff(np.log(sorted(d)))) > 1e-6
    ),
    forgetting=st.floats(1e-4, 10),
)
def test_inside_its_ends_the_chord_is_numpy_interpolation(points, forgetting):
    value, order = chord_at(chord_through(points.items()), forgetting), sorted(points)
    assert value is not None
    assert value[1] == (not order[0] <= forgetting <= order[-1])
    if not value[1]:
        oracle = np.interp(np.log(forgetting), np.log(order), [points[f] for f in order])
        assert math.isclose(value[0], oracle, rel_tol=1e-6, abs_tol=1e-6)


def test_points_that_span_no_chord():
    assert not chord_through(STRAIGHT[:1]) and not chord_through([STRAIGHT[0], (0.0, 2.0)])
    chord = chord_through(STRAIGHT)
    assert chord and chord_at(chord, 0.0) is None and chord_at([], 1.0) is None
    # Of two arms with equal forgetting, the one with the lower loss counts.
    assert chord_through([*STRAIGHT, (0.5, 9.0)]) == chord


def test_fits_need_three_sources_that_differ():
    two, flat, slanted = (
        {"a": 1.0, "b": 2.0},
        dict.fromkeys("abc", 1.0),
        {"a": 1.0, "b": 2.0, "c": 3},
    )
    assert linear_fit(two, two) is None and pearson(two, two) is None
    assert linear_fit(flat, slanted) is None and pearson(slanted, flat) is None
    assert linear_fit(slanted, flat) == (0.0, 1.0)
    almost = {"a": 1.0, "b": 1.0 + 1e-15, "c": 1.0}
    assert linear_fit(almost, slanted) is None and pearson(almost, slanted) is None


# candidate block ids, chosen positions, scores
Step = tuple[list[int], list[int], list[float] | None]


def history_of(tmp_path: Path, steps: list[Step]) -> History:
    """Writes a curriculum and reads its history."""
    path = tmp_path / "curriculum.rod"
    ids, chosen, score = steps[0]
    with create(path, SOURCES, len(ids), len(chosen), scored=score is not None) as curriculum:
        for step, (ids, chosen, score) in enumerate(steps):
            pool = Pool(step, np.array(ids), np.array(ids) >= 10)
            tau = math.nan if score is None else min(np.array(score)[chosen])
            curriculum.append(Choice(pool, score, score, np.array(chosen), tau))
    return read_history(path)


def test_history_by_hand(tmp_path):
    steps: list[Step] = [
        ([0, 1, 10, 15], [0, 1], [0.5, 0.75, 0.0, 0.0]),
        ([2, 11, 16, 17], [0, 2], [0.5, 0.125, 0.25, -0.125]),
        ([14, 3, 18, 19], [0, 2], [1.0, 0.0, 0.5, 0.25]),
    ]
    history = history_of(tmp_path, steps)
    assert history.source_names == ["legal", "code", "web"]
    assert history.drawn_BO.tolist() == [[2, 1, 1], [1, 1, 2], [1, 1, 2]]
    assert history.chosen_BO.tolist() == [[2, 0, 0], [1, 0, 1], [0, 1, 1]]
    assert history.drawn_TR.tolist() == [[2, 2], [1, 3], [1, 3]]
    assert history.score_BOW.sum(axis=1).tolist() == [[0.0, 1.25], [0.0, 0.75], [0.25, 1.5]]
    assert history.share_T.tolist() == [0.0, 0.5, 1.0]
    assert history.threshold_T.tolist() == [0.5, 0.25, 0.5]
    assert history.rho_TR[:, 0].tolist() == [0.625, 0.5, 0.0]
    np.testing.assert_allclose(history.rho_TR[:, 1], [0.0, 0.25 / 3, 1.75 / 3], rtol=1e-6)
    # Chosen: code 1, web 2 of 3; offered: code 3, web 5 of 8.
    ratio = history.sampling_ratio_by_source()
    assert ratio is not None and set(ratio) == {"code", "web"}
    assert ratio["code"] == (1 / 3) / (3 / 8) and ratio["web"] == (2 / 3) / (5 / 8)
    assert history.share_by_decile() is None  # fewer than ten steps
    counts = {"adaptation": {"legal": 2}, "replay": {"code": 4, "web": 1}}
    epochs = {"adaptation": {"legal": 1.5}, "replay": {"code": 0.25, "web": 2.0}}
    assert history.epochs_by_source(counts) == epochs


def test_padding_and_sources_never_offered(tmp_path):
    steps: list[Step] = [([0, 15, -1, -1], [0, 1], [0.5, 0.25, -math.inf, -math.inf])]
    history = history_of(tmp_path, steps)
    assert history.drawn_BO.tolist() == [[1, 0, 1]]
    assert history.rho_TR.tolist() == [[0.5, 0.25]]
    assert history.sampling_ratio_by_source() == {"code": None, "web": 1.0}


def test_an_empty_curriculum_is_refused(tmp_path):
    history_of(tmp_path, [([0, 1], [0, 1], None)])
    with Curriculum.open(tmp_path / "curriculum.rod") as curriculum:
        curriculum.truncate(0)
    with pytest.raises(ValueError, match="holds no step"):
        read_history(tmp_path / "curriculum.rod")


DESIGN: dict[str, Any] = {
    "of": "rod", "steps": 100, "budget": 1.0, "multiplier": 2.0, "kappa": 1.0, "share": None,
    "adaptation": None, "replay": None, "follow": None, "follow_by": None, "curriculum": None,
    "references": ["specialist"],
}  # fmt: skip


def arms_of(**changes: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Returns arms of results with these changes of design; None for an untrained arm."""
    return {
        name: {"design": None if change is None else {**DESIGN, **change}}
        for name, change in changes.items()
    }


def test_variants_in_one_key_alone():
    arms = arms_of(
        rod={}, wide={"multiplier": 4.0}, narrow={"multiplier": 1.5}, base=None,
        both={"multiplier": 8.0, "kappa": 2.0}, heavy={"kappa": 0.5}, other={"of": "x"},
        beyond={"budget": 1.2, "steps": 120}, fixed_9={"of": "fixed_9", "kappa": None},
        fixed_9_long={"of": "fixed_9", "kappa": None, "budget": 2.0, "steps": 200},
        random_rho={"share": 0.3}, control={"follow": "rod"},
        copied={"curriculum": "runs/a", "references": []}, lent={"references": ["runs/a"]},
        lowest={"references": ["specialist", "base"]},
    )  # fmt: skip
    assert varying(arms, "multiplier") == ["narrow", "rod", "wide"]
    swept = arms_of(
        rod={}, beyond={"budget": 1.2, "steps": 120}, m4={"multiplier": 4.0, "steps": 120},
        m8={"multiplier": 8.0, "steps": 120},
    )  # fmt: skip
    assert varying(swept, "multiplier") == ["beyond", "m4", "m8"]
    assert varying(arms, "kappa") == ["heavy", "rod"]
    assert continued_arms(arms) == [["rod", "beyond"], ["fixed_9", "fixed_9_long"]]
    assert with_fixed_share(arms) == ["random_rho", "control"]
    assert helped_arms(arms) == ["copied", "lent"]
    # another way to score, another policy or schedule is no other budget
    at_half = {"budget": 0.5, "steps": 50}
    others = arms_of(
        rod={}, half=at_half, cut={**at_half, "prefix": "1/4"},
        capped={**at_half, "policy_name": "capped"}, slow={**at_half, "train": {"lr": 1e-5}},
    )  # fmt: skip
    assert continued_arms(others) == [["half", "rod"]]
    assert varying(arms_of(base=None), "kappa") == [] and varying({}, "kappa") == []


def test_profiles_with_and_without_the_outlier():
    names = "abcdefg"
    x, y, ratio, fixed = np.random.default_rng(5).uniform(0, 1, (4, 7))
    x[3] = 9.0
    forgetting = [dict(zip(names, values.tolist(), strict=True)) for values in (x, fixed, y)]
    arms: dict[str, Any] = {
        name: {"forgetting_by_source": values, "sampling_ratio_by_source": None}
        for name, values in zip(("no_replay", "fixed_32", "rod"), forgetting, strict=True)
    }
    arms["rod"]["sampling_ratio_by_source"] = dict(zip(names, ratio.tolist(), strict=True))
    rod = profiles_of(arms, "fixed_32")["rod"]
    assert rod["without"] == "d"
    for suffix, used in (("", [*range(7)]), ("_without", [0, 1, 2, 4, 5, 6])):
        slope, intercept = np.polyfit(x[used], y[used], 1)
        assert math.isclose(rod[f"slope{suffix}"], slope)
        assert math.isclose(rod[f"intercept{suffix}"], intercept)
        for key, values in (("pearson_r", x), ("pearson_r_residual", fixed)):
            r = np.corrcoef(values[used], ratio[used])[0, 1]
            assert math.isclose(rod[f"{key}{suffix}"], r)
    assert outlier({"a": 1.0, "b": 2.0, "c": 9.0}) is None


def test_passes_by_counting(tmp_path):
    # chosen: 2, 1, 0, 2, 1 adaptation blocks; three of them are in the store
    chosen = [[0, 1], [0, 2], [2, 3], [0, 1], [0, 2]]
    steps: list[Step] = [([0, 1, 10, 15], picked, [1.0, 1.0, 0.0, 0.0]) for picked in chosen]
    history = history_of(tmp_path, steps)
    assert passes(history, history.chosen_TR[:, 0], 3) == [(1, 1), (2, 4)]
    assert [passes(history, history.chosen_TR[:, 0], n) for n in (7, 0)] == [[], []]
    (tmp_path / "more").mkdir()
    longer = history_of(tmp_path / "more", 3 * steps)  # of 18 passes over a single block, every 5th
    assert passes(longer, longer.chosen_TR[:, 0], 1) == [(5, 3), (10, 8), (15, 11)]
