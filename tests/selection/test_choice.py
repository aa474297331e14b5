"""One step's choice: what it remembers, scores that are no numbers, and its metrics."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rod.selection import Joint, Pool, TakeAll, choose, selection_metrics
from nemo_rod.selection.choice import policy_metrics
from nemo_rod.selection.competition import QUANTILES
from nemo_rod.selection.policies import SCORES, reducible_loss

IS_REPLAY = np.array([False, True, False, True, False, True])
POOL = Pool(step=3, block_ids=np.array([10, 20, 11, 21, 12, 22]), is_replay_C=IS_REPLAY)
REFERENCE = np.full(6, 1.0, dtype=np.float32)
LOSS = np.array([1.5, math.nan, 1.0, 3.0, -math.inf, 0.5], dtype=np.float32)
NUMBERS = "expected 6 numbers: correct it"


def policy_of(**members: Any) -> Any:
    return SimpleNamespace(**{"needs": frozenset(), "select": lambda *_: [0, 1], **members})


@pytest.mark.parametrize(
    "chosen",
    [
        *([0], [0, 0], [1, 0], [-1, 0], [0, 6], [[0], [1]], [[0], [1, 2]], {0, 1}, None, "01", 7),
        *([0.0, 1.0], [True, True], np.array([0, 1], object), np.uint64([0, 2**63]), iter([0, 1])),
    ],
)
def test_a_choice_that_is_none_is_refused(chosen):
    with pytest.raises(ValueError, match=r"step 3: .*<lambda> returned .*expected 2 ascending pos"):
        choose(POOL, policy_of(select=lambda *_: chosen), 2)


def test_what_a_policy_chooses_is_a_copy_of_its_own_kind():
    buffer = np.array([0, 3], dtype=np.uint8)
    choice = choose(POOL, policy_of(select=lambda *_: buffer), 2)
    buffer[:] = 1, 2
    assert choice.chosen.dtype == np.int64 and choice.chosen.tolist() == [0, 3]


@pytest.mark.parametrize("lost", [1, 4])
def test_padding_and_excluded_candidates_cannot_be_chosen(lost):
    policy = policy_of(needs=SCORES, select=lambda *_: sorted([0, lost]))
    sentence = f"<lambda> returned .*{lost}.*, expected no padding and none that was excluded"
    with pytest.raises(ValueError, match=sentence):
        choose(POOL, policy, 2, LOSS, REFERENCE, "exclude")


@pytest.mark.parametrize("values", [None, 1.0, np.ones((6, 1)), np.ones(5), ["a"] * 6, [[1], []]])
@pytest.mark.parametrize("by", ["score", "estimate", "weigh"])
def test_numbers_that_are_not_of_every_candidate_are_refused(values, by):
    part = lambda *_: values  # noqa: E731
    scored = (2, np.ones(6, dtype=np.float32), REFERENCE, "refuse")
    with pytest.raises(ValueError, match=f"step 3: .*<lambda> returned .*{NUMBERS}"):
        if by == "score":
            choose(POOL, Joint(), *scored, part)
        elif by == "weigh":
            choose(POOL, policy_of(weigh=part), *scored)
        else:
            choose(POOL, policy_of(estimate=part), 2)


def test_estimates_are_recorded_as_scores_are():
    choice = choose(POOL, policy_of(estimate=lambda _: [1, 2.0, 3, 4, 5, 6]), 2)
    assert choice.score is not None and choice.score.dtype == np.float32 and choice.is_estimated
    with pytest.raises(ValueError, match=r"1 of 6 scores .* block 11: .*<lambda> is at fault"):
        choose(POOL, policy_of(estimate=lambda _: [1, 2, math.nan, 4, 5, 6]), 2)


def written(array: np.ndarray) -> list[int]:
    array[0] = 0
    return [0, 1]


@pytest.mark.parametrize(
    ("policy", "score"),
    [
        (policy_of(select=lambda pool, *_: written(pool.block_ids)), reducible_loss),
        (policy_of(select=lambda pool, *_: written(pool.is_replay_C)), reducible_loss),
        (policy_of(select=lambda pool, *_: written(pool.source_C)), reducible_loss),
        (policy_of(select=lambda _, score, k: written(score)), reducible_loss),
        (policy_of(weigh=lambda _, score: written(score)), reducible_loss),
        (policy_of(), lambda loss, _: written(loss)),
        (policy_of(), lambda _, reference: written(reference)),
    ],
)
def test_nothing_that_is_recorded_can_be_written_to(policy, score):
    with pytest.raises(ValueError, match=r"step 3: .*<lambda> writes into an array that it is giv"):
        choose(POOL, policy, 2, np.ones(6, dtype=np.float32), REFERENCE, score=score)
    choice = choose(POOL, Joint(), 2, np.ones(6, dtype=np.float32), REFERENCE)
    for array in (choice.loss, choice.score, choice.reference, choice.chosen):
        assert array is not None and not array.flags.writeable
    assert POOL.block_ids.tolist() == [10, 20, 11, 21, 12, 22]


@pytest.mark.parametrize("part", ["select", "estimate", "metrics"])
def test_a_part_that_exits_is_no_stop(part):
    policy = policy_of(**{part: lambda *_: sys.exit(0)})
    sentence = r"step 3: .*<lambda> ends the process \(0\): let it raise an error\."
    with pytest.raises(ValueError, match=sentence):
        policy_metrics(policy, choose(POOL, policy, 2))


@pytest.mark.parametrize(
    "metrics",
    [None, [], {"mine/x": 1.0}, {"rod/x": "1"}, {"rod/x": [1.0]}, {"rod/x": object()}, {3: 1.0}],
)
def test_metrics_of_a_policy_that_are_no_numbers_are_refused(metrics):
    choice = choose(POOL, policy_of(), 2)
    sentence = "step 3: .*<lambda> returned .*expected numbers by names that begin with rod/"
    with pytest.raises(ValueError, match=sentence):
        policy_metrics(policy_of(metrics=lambda _: metrics), choice)


def test_metrics_of_a_policy_are_plain_numbers_beside_those_of_every_run():
    choice = choose(POOL, policy_of(), 2)
    found = {"rod/a": np.float32(0.5), "rod/b": np.int64(3), "rod/c": None, "rod/d": np.array(2)}
    values = policy_metrics(policy_of(metrics=lambda _: found), choice)
    assert json.dumps(values) == '{"rod/a": 0.5, "rod/b": 3.0, "rod/c": null, "rod/d": 2.0}'
    logged = selection_metrics(replace(choice, metrics=values), POOL.source_C, ["new", "old"])
    assert logged.items() >= values.items()
    for name in ("rod/replay_share", "rod/share/old", "rod/overhead"):
        with pytest.raises(ValueError, match=f"metrics include '{name}', which every run has"):
            mine = replace(choice, metrics={name: 0.1})
            selection_metrics(mine, POOL.source_C, ["new", "old"])


def test_a_score_may_be_the_loss_itself():
    before = LOSS.copy()
    choice = choose(POOL, Joint(), 3, LOSS, REFERENCE, "exclude", lambda loss, _: loss)
    assert np.array_equal(LOSS, before, equal_nan=True)
    assert choice.score is not None and np.isneginf(choice.score[[1, 4]]).all()


NAMES = ["new", "old/a", "old/b", "never_drawn"]
REPLAY_OF = np.array([False, True, True, True, False])  # of a source; the last is padding


Metrics = dict[str, float | None]


def approx(values: np.ndarray, figure: Callable[..., Any] = np.mean, *more: Any) -> Any:
    """What a figure of a group is; None if nobody is in it."""
    return pytest.approx(float(figure(values, *more)), abs=1e-12) if len(values) else None


def check(metrics: Metrics, scores: np.ndarray, mean: str, above: str, quantiles: str) -> None:
    """Compares one group's metrics, of these names, with NumPy's."""
    assert metrics[mean] == approx(scores)
    assert metrics[above] == approx(scores > 0)
    for name, share in QUANTILES.items():
        assert metrics[f"{quantiles}{name}"] == approx(scores, np.quantile, share)


FINITE, FAULTS = st.floats(-8, 8, width=32), st.sampled_from([math.nan, math.inf, -math.inf])
NATS = st.one_of(FINITE, FINITE, FINITE, FINITE, FAULTS)


@pytest.mark.filterwarnings("ignore:invalid value")
@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(NATS, NATS, st.integers(0, 2)), min_size=1, max_size=40),
    number=st.integers(0, 40),
    on_nonfinite=st.sampled_from(["refuse", "exclude", "exclude"]),
)
def test_a_choice_and_its_figures_are_those_of_a_plain_sort_and_count(rows, number, on_nonfinite):
    """A loss of -inf is padding, with a source or without; else what is no number is a fault."""
    loss_C, reference_C = (np.array([row[i] for row in rows], dtype=np.float32) for i in (0, 1))
    is_padding_C = np.isneginf(loss_C)
    source_C = np.array([row[2] for row in rows])
    source_C[is_padding_C & (source_C == 0)] = -1
    pool = Pool(3, 100 + np.arange(len(rows)), REPLAY_OF[source_C])
    with np.errstate(invalid="ignore"):
        score_C = np.where(is_padding_C, np.float32(-math.inf), loss_C - reference_C)
    is_fault_C = ~np.isfinite(score_C) & ~is_padding_C
    left, faults = np.flatnonzero(np.isfinite(score_C)).tolist(), np.flatnonzero(is_fault_C)
    k = 1 + number % (len(left) + 1)  # up to one too many
    sentence = rf"^{k} blocks of any role .* the pool holds {len(left)}" if len(left) < k else ""
    if len(faults):
        found = rf"^step 3: {len(faults)} of {len(rows)} scores are not finite, the first that of "
        found += f"block {100 + faults[0]}"
        too_few = f"{found}, and too few are left for a batch of {k}: " if sentence else ""
        sentence = f"{found}: the model " if on_nonfinite == "refuse" else too_few
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        choice = choose(pool, Joint(), k, loss_C, reference_C, on_nonfinite)
    if sentence:
        return
    best = sorted(left, key=lambda place: -score_C[place])[:k]
    assert choice.chosen.tolist() == sorted(best) and choice.threshold == score_C[best[-1]]
    assert choice.block_ids.tolist() == [100 + place for place in sorted(best)]
    assert np.array_equal(choice.score, np.where(is_fault_C, np.float32(-math.inf), score_C))
    metrics = selection_metrics(choice, source_C, NAMES)
    assert metrics["rod/excluded"] == choice.excluded == len(faults)
    score_C, is_replay_C = score_C.astype(np.float64), pool.is_replay_C
    is_chosen_C = np.isin(np.arange(len(rows)), choice.chosen)
    assert metrics["rod/replay_share"] == is_replay_C[is_chosen_C].mean()
    competes_C = np.isfinite(score_C)  # what was excluded was drawn; padding of no source was not
    for role, mask in (("adaptation", ~is_replay_C), ("replay", is_replay_C)):
        mean = f"rod/rho_{role}"
        check(metrics, score_C[mask & competes_C], mean, f"rod/{role}_above_zero", f"{mean}_")
    for source, name in enumerate(NAMES):
        mine, group = source_C == source, f"rod/rho/{name}/"
        check(metrics, score_C[mine & competes_C], f"{group}mean", f"{group}above_zero", group)
        assert metrics[f"rod/candidates/{name}"] == mine.sum()
        assert metrics[f"rod/chosen/{name}"] == (mine & is_chosen_C).sum()
        assert metrics[f"rod/share/{name}"] == (mine & is_chosen_C).sum() / k
    for group, mask in (
        *(("adaptation", ~is_replay_C), ("replay", is_replay_C)),
        *(("chosen", is_chosen_C), ("dropped", ~is_chosen_C)),
    ):
        mask = mask & competes_C
        if group in ("chosen", "dropped"):
            assert metrics[f"rod/rho_{group}"] == approx(score_C[mask])
        for name, value_C in (("loss", loss_C), ("reference", reference_C)):
            assert metrics[f"rod/{name}_{group}"] == approx(value_C[mask].astype(np.float64))


def test_a_pool_whose_scores_are_all_lost_still_has_its_counts():
    source_C, nats = np.array([0, 1]), np.ones(2, dtype=np.float32)
    choice = choose(Pool(0, source_C, REPLAY_OF[source_C]), Joint(), 2, nats, nats)
    lost = replace(choice, score=np.full(2, -np.inf, dtype=np.float32))
    metrics = selection_metrics(lost, source_C, NAMES)
    assert metrics["rod/rho_chosen"] is metrics["rod/rho_replay_p90"] is None
    assert metrics["rod/replay_above_zero"] is None
    assert metrics["rod/chosen/old/a"] == 1


def test_without_scores_there_are_counts_alone():
    pool = Pool(0, np.arange(3), np.array([False, True, True]))
    choice = choose(pool, TakeAll(), 3)
    assert choice.chosen.tolist() == [0, 1, 2]
    assert choice.score is None and math.isnan(choice.threshold)
    metrics = selection_metrics(choice, np.array([0, 1, 1]), NAMES)
    assert metrics["rod/candidates/old/a"] == metrics["rod/chosen/old/a"] == 2
    assert metrics["rod/rho_replay"] is None and metrics["rod/threshold"] is None
    assert not any(name.startswith("rod/rho/") for name in metrics)
