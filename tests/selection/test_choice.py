"""One step's choice: what it remembers, scores that are no numbers, and its metrics."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rod.selection import Choice, Joint, OnNonfinite, Pool, TakeAll, choose, selection_metrics
from nemo_rod.selection.competition import QUANTILES

IS_REPLAY = np.array([False, True, False, True, False, True])
POOL = Pool(step=3, block_ids=np.array([10, 20, 11, 21, 12, 22]), is_replay_C=IS_REPLAY)
REFERENCE = np.full(6, 1.0, dtype=np.float32)


def chosen_from(*losses: float, on_nonfinite: OnNonfinite = "refuse", k: int = 3) -> Choice:
    loss = np.array(losses, dtype=np.float32)
    return choose(POOL, Joint(), k, loss, REFERENCE, on_nonfinite)


def test_highest_scores_and_their_threshold():
    choice = chosen_from(1.5, 1.25, 1.0, 3.0, 2.0, 0.5)
    assert choice.block_ids.tolist() == [10, 21, 12]
    assert choice.threshold == 0.5
    assert choice.excluded == 0
    metrics = selection_metrics(choice, IS_REPLAY.astype(np.int64), ["new", "old"])
    assert metrics["rod/replay_share"] == pytest.approx(1 / 3)
    assert metrics["rod/rho_adaptation"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert metrics["rod/rho_replay"] == pytest.approx((0.25 + 2.0 - 0.5) / 3)
    assert metrics["rod/share/new"] == pytest.approx(2 / 3)
    assert metrics["rod/excluded"] == 0


def test_nothing_is_scored_for_a_policy_that_takes_all():
    choice = choose(POOL, TakeAll(), 6)
    assert choice.chosen.tolist() == [0, 1, 2, 3, 4, 5]
    assert choice.score is None and math.isnan(choice.threshold)


@pytest.mark.parametrize("chosen", [[0], [0, 0], [1, 0], [-1, 0], [0, 6], [[0], [1]]], ids=str)
def test_a_choice_that_is_none_is_refused(chosen):
    policy: Any = SimpleNamespace(needs=frozenset(), select=lambda *_: chosen)
    with pytest.raises(ValueError, match=r"(?s)step 3: SimpleNamespace.select .*expected 2 "):
        choose(POOL, policy, 2)


def test_a_score_may_be_the_loss_itself():
    loss = np.array([1.5, math.nan, 1.0, 3.0, -math.inf, 0.5], dtype=np.float32)
    before = loss.copy()
    choice = choose(POOL, Joint(), 3, loss, REFERENCE, "exclude", lambda loss, _: loss)
    assert np.array_equal(loss, before, equal_nan=True)
    assert choice.score is not None and np.isneginf(choice.score[[1, 4]]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused_and_named(bad):
    with pytest.raises(
        ValueError, match=r"^step 3: 2 of 6 scores are not finite, the first that of block 20: "
    ):
        chosen_from(1.5, bad, 1.0, bad, 2.0, 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_excluded_and_counted(bad):
    choice = chosen_from(1.5, bad, 1.0, bad, 2.0, 0.5, on_nonfinite="exclude")
    assert choice.block_ids.tolist() == [10, 11, 12]
    assert choice.excluded == 2
    metrics = selection_metrics(choice, IS_REPLAY.astype(np.int64), ["new", "old"])
    assert metrics["rod/excluded"] == 2
    assert metrics["rod/rho_replay"] == pytest.approx(-0.5)


@pytest.mark.parametrize("reference", [1.0, math.inf, math.nan])
def test_padding_is_never_chosen_nor_taken_for_a_fault(reference):
    loss = np.array([1.5, -math.inf, 1.0, 3.0, -math.inf, 0.5], dtype=np.float32)
    reference_C = np.where(np.isneginf(loss), np.float32(reference), REFERENCE)
    choice = choose(POOL, Joint(), 4, loss, reference_C)
    assert choice.block_ids.tolist() == [10, 11, 21, 22] and choice.excluded == 0
    assert choice.score is not None
    assert choice.score.tolist() == [0.5, -math.inf, 0.0, 2.0, -math.inf, -0.5]
    with pytest.raises(ValueError, match=r"^5 blocks of any role .* the pool holds 4"):
        choose(POOL, Joint(), 5, loss, reference_C)


def test_beside_padding_a_fault_is_still_refused():
    padded = (1.5, -math.inf, 1.0, math.nan, 2.0, 0.5)
    with pytest.raises(ValueError, match=r"^step 3: 1 of 6 scores .* that of block 21: the model"):
        chosen_from(*padded)
    assert chosen_from(*padded, on_nonfinite="exclude", k=4).excluded == 1
    with pytest.raises(ValueError, match=r"1 of 6 scores .* too few are left for a batch of 5"):
        chosen_from(*padded, on_nonfinite="exclude", k=5)
    loss, reference = np.ones(6, dtype=np.float32), REFERENCE.copy()
    reference[2] = math.inf  # a score of -inf, but of a block that has a loss
    with pytest.raises(ValueError, match=r"^step 3: 1 of 6 scores .* that of block 11: "):
        choose(POOL, Joint(), 3, loss, reference)


def test_too_few_scores_that_are_numbers_are_refused():
    with pytest.raises(ValueError, match=r"4 of 6 scores .* too few are left for a batch of 3"):
        chosen_from(1.5, *[math.nan] * 4, 0.5, on_nonfinite="exclude")


NAMES = ["new", "old/a", "old/b", "never_drawn"]
REPLAY_OF = np.array([False, True, True, True, False])  # of a source; the last is padding


def choice_of(score: list[float], source: list[int], k: int) -> tuple[Choice, np.ndarray]:
    source_C = np.array(source, dtype=np.int64)
    pool = Pool(0, np.arange(len(source)), REPLAY_OF[source_C])
    loss_C = np.array(score, dtype=np.float32)
    reference_C = np.linspace(0, 1, len(score), dtype=np.float32)
    return choose(pool, Joint(), k, loss_C, reference_C), source_C


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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-8, 8, width=32), st.integers(0, 2)), min_size=1, max_size=40
    ).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, len(rows))))
)
def test_every_figure_is_that_of_a_plain_count(drawn):
    rows, k = drawn
    choice, source_C = choice_of([score for score, _ in rows], [source for _, source in rows], k)
    metrics = selection_metrics(choice, source_C, NAMES)
    assert choice.score is not None
    score_C, is_replay_C = choice.score.astype(np.float64), choice.pool.is_replay_C
    is_chosen_C = np.isin(np.arange(len(rows)), choice.chosen)
    for role, mask in (("adaptation", ~is_replay_C), ("replay", is_replay_C)):
        mean = f"rod/rho_{role}"
        check(metrics, score_C[mask], mean, f"rod/{role}_above_zero", f"{mean}_")
    for number, name in enumerate(NAMES):
        mine, group = source_C == number, f"rod/rho/{name}/"
        check(metrics, score_C[mine], f"{group}mean", f"{group}above_zero", group)
        assert metrics[f"rod/candidates/{name}"] == mine.sum()
        assert metrics[f"rod/chosen/{name}"] == (mine & is_chosen_C).sum()
        assert metrics[f"rod/share/{name}"] == (mine & is_chosen_C).sum() / k
    assert metrics["rod/rho_chosen"] == approx(score_C[is_chosen_C])
    assert metrics["rod/rho_dropped"] == approx(score_C[~is_chosen_C])
    assert choice.loss is not None and choice.reference is not None
    for group, mask in (
        *(("adaptation", ~is_replay_C), ("replay", is_replay_C)),
        *(("chosen", is_chosen_C), ("dropped", ~is_chosen_C)),
    ):
        for name, value_C in (("loss", choice.loss), ("reference", choice.reference)):
            assert metrics[f"rod/{name}_{group}"] == approx(value_C[mask].astype(np.float64))


def test_padding_and_excluded_candidates_do_not_compete():
    pool = Pool(0, np.array([0, 1, 2, 3, -1]), np.array([False, True, True, True, False]))
    loss = np.array([3.0, 1.0, 2.0, math.nan, -math.inf], dtype=np.float32)
    choice = choose(pool, Joint(), 2, loss, np.zeros(5, dtype=np.float32), "exclude")
    metrics = selection_metrics(choice, np.array([0, 1, 1, 1, -1]), NAMES)
    assert choice.chosen.tolist() == [0, 2] and metrics["rod/excluded"] == 1
    assert metrics["rod/rho_adaptation"] == metrics["rod/rho_adaptation_p10"] == 3.0
    assert metrics["rod/rho_replay"] == metrics["rod/rho/old/a/p50"] == 1.5
    assert metrics["rod/rho_dropped"] == 1.0
    # what was excluded was drawn; what pads the pool was not
    assert [metrics[f"rod/candidates/{name}"] for name in NAMES] == [1, 3, 0, 0]


def test_a_pool_whose_scores_are_all_lost_still_has_its_counts():
    choice, source_C = choice_of([1.0, 2.0], [0, 1], 2)
    assert choice.score is not None
    lost = replace(choice, score=np.full(2, -np.inf, dtype=np.float32))
    metrics = selection_metrics(lost, source_C, NAMES)
    assert metrics["rod/rho_chosen"] is metrics["rod/rho_replay_p90"] is None
    assert metrics["rod/replay_above_zero"] is None
    assert metrics["rod/chosen/old/a"] == 1


def test_without_scores_there_are_counts_alone():
    pool = Pool(0, np.arange(3), np.array([False, True, True]))
    metrics = selection_metrics(choose(pool, TakeAll(), 3), np.array([0, 1, 1]), NAMES)
    assert metrics["rod/candidates/old/a"] == metrics["rod/chosen/old/a"] == 2
    assert metrics["rod/rho_replay"] is None and metrics["rod/threshold"] is None
    assert not any(name.startswith("rod/rho/") for name in metrics)
