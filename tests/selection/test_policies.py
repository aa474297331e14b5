"""Policies against a plain sort: ties, padding, shares; scores that are no numbers are refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.selection import Pool
from nemo_rod.selection.policies import (
    SCORES,
    FixedShare,
    Joint,
    TakeAll,
    apportion,
    first_of_groups,
    reducible_loss,
    weigh,
)

# Few distinct values, so that ties are the rule; -inf is padding.
VALUES = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 0.5000001, 1.0, 3.0])


@st.composite
def pools(draw):
    scores = draw(st.lists(VALUES, min_size=1, max_size=40))
    roles = draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    return np.array(scores, dtype=np.float32), np.array(roles)


def pool_of(is_replay_C):
    return Pool(0, np.arange(len(is_replay_C)), is_replay_C)


def best(scores, positions, k):
    """The k of `positions` with the highest scores, by Python's stable sort."""
    ranked = sorted((p for p in positions if scores[p] > -math.inf), key=lambda p: -scores[p])
    return ranked[:k] if len(ranked) >= k else None


@given(pool=pools(), k=st.integers(1, 40), kappa=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_joint_is_a_stable_sort(pool, k, kappa):
    score_C, is_replay_C = pool
    weighted = [
        float(s) * kappa if replay and s > -math.inf else float(s)
        for s, replay in zip(score_C, is_replay_C, strict=True)
    ]
    # Padding stays padding at any kappa.
    assert Joint(kappa).weigh(pool_of(is_replay_C), score_C).tolist() == weighted
    expected = best(weighted, range(len(weighted)), k)
    if expected is None:
        with pytest.raises(ValueError, match=rf"^{k} blocks of any role are to be chosen but"):
            Joint(kappa).select(pool_of(is_replay_C), score_C, k)
        return
    chosen = Joint(kappa).select(pool_of(is_replay_C), score_C, k)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == sorted(expected)


@given(
    pool=pools(), k=st.integers(1, 40), share=st.sampled_from([0.0, 0.1, 0.32, 0.5, 1.0]),
    adaptation=st.sampled_from(["random", "rho"]), replay=st.sampled_from(["random", "rho"]),
)  # fmt: skip
def test_fixed_share_is_two_stable_sorts(pool, k, share, adaptation, replay):
    score_C, is_replay_C = pool
    num_replay = round(share * k)
    expected = []
    for role, within, count in ((False, adaptation, k - num_replay), (True, replay, num_replay)):
        positions = np.flatnonzero(is_replay_C == role).tolist()
        scores = score_C.tolist()
        if within == "random":  # the first of the pool that are not padding
            scores = [s if s == -math.inf else 0.0 for s in scores]
        expected.append(best(scores, positions, count))
    policy = FixedShare(share, adaptation=adaptation, replay=replay)
    if None in expected:
        sentence = r"draw more candidates for each, or .*selection\.balance"
        with pytest.raises(ValueError, match=sentence):
            policy.select(pool_of(is_replay_C), score_C, k)
        return
    chosen = policy.select(pool_of(is_replay_C), score_C, k)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == sorted(expected[0] + expected[1])
    assert is_replay_C[chosen].sum() == num_replay
    assert np.array_equal(weigh(policy, pool_of(is_replay_C), score_C), score_C)


def test_many_ties_are_sorted_stably():
    rng = np.random.default_rng(0)
    score_C = rng.integers(0, 3, 2048).astype(np.float32)
    is_replay_C = rng.random(2048) < 0.5
    for k in (1, 500, 1024, 2000):
        expected = sorted(best(score_C.tolist(), range(2048), k))
        assert Joint().select(pool_of(is_replay_C), score_C, k).tolist() == expected


def test_take_all():
    is_replay_C = np.array([True, False, True, False])
    assert TakeAll().select(pool_of(is_replay_C), None, 4).tolist() == [0, 1, 2, 3]
    assert TakeAll().select(pool_of(is_replay_C), np.full(4, np.nan), 4).tolist() == [0, 1, 2, 3]
    padded = np.array([1.0, -np.inf, np.nan, 0.0])
    assert TakeAll().select(pool_of(is_replay_C), padded, 3).tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="the pool holds 4 blocks and the batch 3: draw"):
        TakeAll().select(pool_of(is_replay_C), None, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("policy", [Joint(), FixedShare(0.5, adaptation="rho")])
def test_scores_that_are_not_finite_are_never_sorted(policy, bad):
    """`choose` refuses them with step and block; see test_choice.py."""
    score_C = np.arange(20, dtype=np.float32)
    score_C[[3, 17]] = bad
    with pytest.raises(AssertionError, match=r"scores of (any role|adaptation) are not finite"):
        policy.select(pool_of(np.arange(20) % 2 == 0), score_C, 4)


def test_who_needs_scores():
    assert Joint().needs == SCORES
    assert FixedShare(0.3, replay="rho").needs == SCORES
    assert FixedShare(0.3, adaptation="rho").needs == SCORES
    assert not TakeAll().needs
    random = FixedShare(0.25)
    assert not random.needs
    is_replay_C = np.array([True, True, False, False, True, False, False, False])
    assert random.select(pool_of(is_replay_C), None, 4).tolist() == [0, 2, 3, 5]
    assert random.select(pool_of(is_replay_C), np.full(8, np.nan), 4).tolist() == [0, 2, 3, 5]


@given(st.lists(st.floats(0, 20, width=32), min_size=1, max_size=10))
def test_equal_losses_score_exactly_zero(losses):
    score_C = reducible_loss(losses, np.array(losses, dtype=np.float32))
    assert score_C.dtype == np.float32
    assert not score_C.any()
    reference_C = np.float32(losses) / np.float32(3)
    assert np.array_equal(reducible_loss(losses, reference_C), np.float32(losses) - reference_C)


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    k=st.integers(1, 40),
    first=st.integers(0, 1000),
)
def test_counts_add_up_to_the_shares_over_time(shares, k, first):
    share_G, steps = np.array(shares) / sum(shares), 50
    counts = np.array([apportion(share_G, k, step) for step in range(first, first + steps)])
    assert (counts.sum(axis=1) == k).all() and (counts >= 0).all()
    assert (np.abs(counts - share_G * k) < 1 + 1e-9).all()  # rounded up or down
    assert (np.abs(counts.sum(axis=0) - steps * share_G * k) < 4).all()


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    counts=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
def test_groups_give_their_first_and_the_pool_the_rest(groups, counts):
    k = min(sum(counts), len(groups))
    if sum(counts) != k:
        return
    chosen = first_of_groups(np.array(groups), np.array(counts), k).tolist()
    own = {i for g in range(4) for i in [j for j, h in enumerate(groups) if h == g][: counts[g]]}
    left = [i for i in range(len(groups)) if i not in own]
    assert chosen == sorted([*own, *left[: k - len(own)]])
    with pytest.raises(ValueError, match=r"the pool holds"):
        first_of_groups(np.array(groups), np.array([99, 0, 0, 0]), len(groups) + 1)
