from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.chord import Chord, ChordPoint, linear_fit, outlier, pearson
from nemo_rod.lab.report.designs import continued, helped, varying, with_fixed_share
from nemo_rod.lab.report.figures.during_training import exposures
from nemo_rod.lab.report.figures.labels import spread
from nemo_rod.lab.report.history import read_history
from nemo_rod.lab.report.results import profiles_of
from nemo_rod.lab.report.style import COLOURS, arm_colour, with_variables
from nemo_rod.lab.report.verdicts import Bounds
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader, SourceRow
from nemo_rod.selection.curriculum.log import Curriculum

SOURCES = (
    SourceRow("legal", "adaptation", 0, 10),
    SourceRow("code", "replay", 10, 5),
    SourceRow("web", "replay", 15, 5),
)


# ---------------------------------------------------------------- names and colours


@pytest.mark.parametrize(
    ("name", "kind", "value", "label"),
    [
        ("base", "base", 0, "base"),
        ("no_replay", "no_replay", 0, "no replay"),
        ("fixed_32", "fixed", 32, "fixed 32 %"),
        ("fixed_12.5", "fixed", 12.5, "fixed 12.5 %"),
        ("merge_0.6", "merge", 0.6, "merge 0.6"),
        ("merge_0_6", "merge", 0.6, "merge 0.6"),
        ("merge_1", "merge", 1, "merge 1"),
        ("max_replay", "max_replay", 0, "max replay"),
        ("rod", "rod", 0, "RoD"),
        ("rod_compute_matched", "rod_variant", 0, "RoD compute matched"),
        ("fixed_share_rho", "other", 0, "fixed share rho"),
        ("fixed_20_converged", "other", 0, "fixed 20 %, converged"),
    ],
)
def test_arm_names(name: str, kind: str, value: float, label: str) -> None:
    arm = parse_arm(name)
    assert (arm.kind, arm.value, arm.label) == (kind, value, label)


def test_arms_are_listed_from_the_base_to_rod() -> None:
    names = ["rod_x", "rod", "merge_0.8", "merge_0.2", "fixed_100", "fixed_20", "no_replay", "base"]
    assert sorted(names, key=lambda name: parse_arm(name).order) == [
        "base", "no_replay", "fixed_20", "fixed_100", "merge_0.2", "merge_0.8", "rod", "rod_x",
    ]  # fmt: skip


def test_colours_tell_roles_and_fixed_arms_apart() -> None:
    for theme in (0, 1):
        values = [pair[theme] for pair in COLOURS.values()]
        assert len(set(values)) == len(values)
    arms = [parse_arm(f"fixed_{percent}") for percent in (10, 20, 32, 50)]
    assert len({arm_colour(arm, arms) for arm in arms}) == 4
    assert with_variables(COLOURS["rod"][0]) == "var(--rod)"


# ---------------------------------------------------------------- chord and fits

# Straight in ln F by construction: 1.9 at F = 1, .1 more for every halving.
STRAIGHT = [ChordPoint(f"f{k}", 2.0**-k, 1.9 + 0.1 * k) for k in range(4)]


def test_the_chord_goes_through_its_arms_and_is_straight_in_ln_f() -> None:
    chord = Chord.through(STRAIGHT[::-1])
    assert chord is not None
    for point in STRAIGHT:
        value = chord.at(point.forgetting)
        assert value is not None and not value.extrapolated
        assert math.isclose(value.adapt_loss, point.adapt_loss, rel_tol=1e-12)
    middle = chord.at(2.0**-1.5)
    assert middle is not None and math.isclose(middle.adapt_loss, 2.05, rel_tol=1e-12)


@pytest.mark.parametrize(("forgetting", "expected"), [(4.0, 1.7), (2.0**-5, 2.4)])
def test_beyond_its_ends_the_chord_goes_on_and_says_so(forgetting: float, expected: float) -> None:
    chord = Chord.through(STRAIGHT)
    assert chord is not None
    value = chord.at(forgetting)
    assert value is not None and value.extrapolated
    assert math.isclose(value.adapt_loss, expected, rel_tol=1e-12)


@given(
    points=st.dictionaries(st.floats(1e-4, 10), st.floats(0, 10), min_size=2, max_size=6).filter(
        lambda d: min(np.diff(np.log(sorted(d)))) > 1e-6
    ),
    forgetting=st.floats(1e-4, 10),
)
def test_inside_its_ends_the_chord_is_numpy_interpolation(
    points: dict[float, float], forgetting: float
) -> None:
    chord = Chord.through([ChordPoint(str(f), f, loss) for f, loss in points.items()])
    assert chord is not None
    value = chord.at(forgetting)
    assert value is not None
    order = sorted(points)
    assert value.extrapolated == (not order[0] <= forgetting <= order[-1])
    if not value.extrapolated:
        oracle = np.interp(np.log(forgetting), np.log(order), [points[f] for f in order])
        assert math.isclose(value.adapt_loss, oracle, rel_tol=1e-6, abs_tol=1e-6)


def test_what_no_chord_can_be_drawn_through() -> None:
    assert Chord.through(STRAIGHT[:1]) is None
    assert Chord.through([STRAIGHT[0], ChordPoint("zero", 0.0, 2.0)]) is None
    chord = Chord.through(STRAIGHT)
    assert chord is not None and chord.at(0.0) is None
    # Of two arms that forget alike the better adapted one counts.
    twin = Chord.through([*STRAIGHT, ChordPoint("worse", 0.5, 9.0)])
    assert twin == chord


def test_fits_against_numpy() -> None:
    rng = np.random.default_rng(0)
    x = {str(i): float(v) for i, v in enumerate(rng.normal(size=9))}
    y = {str(i): float(v) for i, v in enumerate(rng.normal(size=9))}
    fit, r = linear_fit(x, y), pearson(x, y)
    assert fit is not None and r is not None
    np.testing.assert_allclose(fit, np.polyfit(list(x.values()), list(y.values()), 1))
    assert math.isclose(r, np.corrcoef(list(x.values()), list(y.values()))[0, 1])
    assert math.isclose(pearson(x, {name: -2 * v for name, v in x.items()}) or 0, -1.0)


def test_fits_need_three_sources_that_differ() -> None:
    two = {"a": 1.0, "b": 2.0}
    assert linear_fit(two, two) is None and pearson(two, two) is None
    flat, slanted = dict.fromkeys("abc", 1.0), {"a": 1.0, "b": 2.0, "c": 3.0}
    assert linear_fit(flat, slanted) is None and pearson(slanted, flat) is None
    assert linear_fit(slanted, flat) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Bounds(high=0.85), "<= 0.85", 0.85, 0.851),
        (Bounds(low=0.75, strict=True), "> 0.75", 0.7501, 0.75),
        (Bounds(low=0.25, high=0.45), "0.25 to 0.45", 0.25, 0.2499),
        (Bounds(low=0.0, high=0.0), "= 0", 0.0, 1e-9),
        (Bounds(high=-0.008), "<= -0.008", -0.008, -0.0079),
    ],
)
def test_bounds(bounds: Bounds, text: str, inside: float, outside: float) -> None:
    assert str(bounds) == text
    assert bounds.hold(inside) and not bounds.hold(outside)


# ---------------------------------------------------------------- labels

positions = st.lists(st.floats(-5, 15), min_size=1, max_size=12)


@given(positions=positions, gap=st.floats(0.01, 0.8))
def test_spread_labels_keep_their_order_distance_and_range(
    positions: list[float], gap: float
) -> None:
    placed = spread(positions, gap, 0.0, 10.0)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    ordered = [placed[i] for i in order]
    assert min(placed) >= -1e-9 and max(placed) <= 10 + 1e-9
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(ordered))


def test_labels_that_do_not_touch_stay_where_they_are() -> None:
    assert spread([1.0, 8.0, 3.0], 1.0, 0.0, 10.0) == [1.0, 8.0, 3.0]
    # A touching pair parts evenly; what does not fit is spaced evenly.
    assert spread([4.0, 4.0], 1.0, 0.0, 10.0) == [3.5, 4.5]
    assert spread([5.0, 5.0, 5.0], 10.0, 0.0, 10.0) == [0.0, 5.0, 10.0]
    assert spread([], 1.0, 0.0, 1.0) == []


# ---------------------------------------------------------------- curriculum


# candidate block ids, chosen positions, scores
Step = tuple[list[int], list[int], list[float] | None]


def write_curriculum(path: Path, steps: list[Step]) -> None:
    header = CurriculumHeader(
        num_candidates=len(steps[0][0]), num_chosen=len(steps[0][1]), block_size=8, store="s",
        tokenizer="t", references="", config="c", seed=0, sources=SOURCES,
        scored=steps[0][2] is not None,
    )  # fmt: skip
    with Curriculum.create(path, header) as curriculum:
        for step, (ids, chosen, score) in enumerate(steps):
            block_ids = np.array(ids)
            pool = Pool(step, block_ids, block_ids >= 10)
            tau = math.nan if score is None else min(np.array(score)[chosen])
            curriculum.append(Choice(pool, score, score, np.array(chosen), tau))


def test_history_by_hand(tmp_path: Path) -> None:
    steps: list[Step] = [
        ([0, 1, 10, 15], [0, 1], [0.5, 0.75, 0.0, 0.0]),
        ([2, 11, 16, 17], [0, 2], [0.5, 0.125, 0.25, -0.125]),
        ([14, 3, 18, 19], [0, 2], [1.0, 0.0, 0.5, 0.25]),
    ]
    write_curriculum(tmp_path / "curriculum.rod", steps)
    history = read_history(tmp_path / "curriculum.rod")
    assert history.source_names == ("legal", "code", "web")
    assert history.candidates_TO.tolist() == [[2, 1, 1], [1, 1, 2], [1, 1, 2]]
    assert history.chosen_TO.tolist() == [[2, 0, 0], [1, 0, 1], [0, 1, 1]]
    assert history.share_T.tolist() == [0.0, 0.5, 1.0]
    assert history.threshold_T.tolist() == [0.5, 0.25, 0.5]
    assert history.rho_adaptation_T.tolist() == [0.625, 0.5, 0.0]
    np.testing.assert_allclose(history.rho_replay_T, [0.0, 0.25 / 3, 1.75 / 3])
    # Chosen: code 1, web 2 of 3; offered: code 3, web 5 of 8.
    ratio = history.sampling_ratio_by_source()
    assert ratio is not None and set(ratio) == {"code", "web"}
    assert ratio["code"] == (1 / 3) / (3 / 8) and ratio["web"] == (2 / 3) / (5 / 8)
    assert history.share_by_decile() is None  # three steps make no ten parts


def test_history_of_an_arm_without_scores_or_replay(tmp_path: Path) -> None:
    write_curriculum(tmp_path / "curriculum.rod", [([0, 1], [0, 1], None)] * 12)
    history = read_history(tmp_path / "curriculum.rod")
    assert not history.is_scored
    assert history.sampling_ratio_by_source() is None
    assert history.share_by_decile() == [0.0] * 10


def test_padding_and_sources_never_offered(tmp_path: Path) -> None:
    steps: list[Step] = [([0, 15, -1, -1], [0, 1], [0.5, 0.25, -math.inf, -math.inf])]
    write_curriculum(tmp_path / "curriculum.rod", steps)
    history = read_history(tmp_path / "curriculum.rod")
    assert history.candidates_TO.tolist() == [[1, 0, 1]]
    assert history.rho_replay_T.tolist() == [0.25]
    assert history.sampling_ratio_by_source() == {"code": None, "web": 1.0}


def test_the_first_deciles_take_the_steps_that_do_not_divide(tmp_path: Path) -> None:
    # One more chosen replay block at steps 0 .. 11; ten parts of 2, 2, 1, 1, ...
    steps: list[Step] = [([0, 10], [step % 2], [1.0, 0.0]) for step in range(12)]
    write_curriculum(tmp_path / "curriculum.rod", steps)
    history = read_history(tmp_path / "curriculum.rod")
    assert history.share_by_decile() == [0.5, 0.5, 0, 1, 0, 1, 0, 1, 0, 1]


def test_an_empty_curriculum_is_refused(tmp_path: Path) -> None:
    write_curriculum(tmp_path / "curriculum.rod", [([0, 1], [0, 1], None)])
    with Curriculum.open(tmp_path / "curriculum.rod") as curriculum:
        curriculum.truncate(0)
    with pytest.raises(ValueError, match="holds no step"):
        read_history(tmp_path / "curriculum.rod")


# ---------------------------------------------------------------- designs, profiles, exposures

DESIGN: dict[str, Any] = {
    "of": "rod", "steps": 100, "budget": 1.0, "multiplier": 2.0, "kappa": 1.0, "share": None,
    "adaptation": None, "replay": None, "follow": None, "follow_by": None, "curriculum": None,
    "references": ["specialist"],
}  # fmt: skip


def arms_of(**changes: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Arms of results with what sets them apart; None for one that was not trained."""
    return {
        name: {"design": None if change is None else {**DESIGN, **change}}
        for name, change in changes.items()
    }


def test_variants_in_one_key_alone() -> None:
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
    longer = {name: {"multiplier": m, "steps": 120} for name, m in (("m4", 4.0), ("m8", 8.0))}
    swept = arms_of(rod={}, beyond={"budget": 1.2, "steps": 120}, **longer)
    assert varying(swept, "multiplier") == ["beyond", "m4", "m8"]
    assert varying(arms, "kappa") == ["heavy", "rod"]
    assert continued(arms) == [["rod", "beyond"], ["fixed_9", "fixed_9_long"]]
    assert with_fixed_share(arms) == ["random_rho", "control"]
    assert helped(arms) == ["copied", "lent"]
    assert varying(arms_of(base=None), "kappa") == [] and varying({}, "kappa") == []


def test_profiles_with_and_without_the_outlier() -> None:
    rng = np.random.default_rng(5)
    names = list("abcdefg")
    x = dict(zip(names, rng.uniform(0, 1, 7), strict=True)) | {"d": 9.0}
    y = dict(zip(names, rng.uniform(0, 1, 7), strict=True))
    ratio = dict(zip(names, rng.uniform(0, 2, 7), strict=True))
    fixed = dict(zip(names, rng.uniform(0, 1, 7), strict=True))
    arms = {
        "no_replay": {"forgetting_by_source": x, "sampling_ratio_by_source": None},
        "fixed_32": {"forgetting_by_source": fixed, "sampling_ratio_by_source": None},
        "rod": {"forgetting_by_source": y, "sampling_ratio_by_source": ratio},
    }
    rod = profiles_of(arms, "fixed_32")["rod"]
    kept = [name for name in names if name != "d"]
    assert rod["without"] == "d"

    def pick(values: dict[str, float], over: list[str]) -> list[float]:
        return [values[name] for name in over]

    for suffix, over in (("", names), ("_without", kept)):
        slope, intercept = np.polyfit(pick(x, over), pick(y, over), 1)
        assert math.isclose(rod[f"slope{suffix}"], slope)
        assert math.isclose(rod[f"intercept{suffix}"], intercept)
        r = np.corrcoef(pick(x, over), pick(ratio, over))[0, 1]
        assert math.isclose(rod[f"pearson_r{suffix}"], r)
        r = np.corrcoef(pick(fixed, over), pick(ratio, over))[0, 1]
        assert math.isclose(rod[f"pearson_r_residual{suffix}"], r)
    assert outlier({"a": 1.0, "b": 2.0, "c": 9.0}) is None


def test_exposures_by_counting(tmp_path: Path) -> None:
    # chosen: 2, 1, 0, 2, 1 adaptation blocks; three of them are in the store
    chosen = [[0, 1], [0, 2], [2, 3], [0, 1], [0, 2]]
    steps: list[Step] = [([0, 1, 10, 15], picked, [1.0, 1.0, 0.0, 0.0]) for picked in chosen]
    write_curriculum(tmp_path / "curriculum.rod", steps)
    history = read_history(tmp_path / "curriculum.rod")
    assert exposures(history, 3) == [(1, 1), (2, 4)]
    assert exposures(history, 7) == [] and exposures(history, 0) == []
