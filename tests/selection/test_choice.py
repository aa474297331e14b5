"""One step's choice: what it remembers, and scores that are no numbers."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_rod.selection import Choice, Joint, OnNonfinite, Pool, TakeAll, choose, selection_metrics

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
