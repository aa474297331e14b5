"""Policies against a plain sort: ties, padding, shares; scores that are no numbers are refused.

`Schedule` and `ODM` are compared with plans and a bandit that a reader can follow.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.alternatives.odm import ODM
from nemo_rod.selection import Choice, Pool, SourceRow
from nemo_rod.selection.arms import Arm, make_arm
from nemo_rod.selection.policies import (
    SCORES,
    FixedShare,
    Joint,
    TakeAll,
    apportion,
    first_of_groups,
    needs_of,
    reducible_loss,
)
from nemo_rod.selection.schedule import Schedule

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
    assert not hasattr(policy, "weigh")  # compares the scores as they are


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


def part(**members: Any) -> Any:
    """A policy with these members."""
    own = {"needs": frozenset(), "select": lambda *_: [0], **members}
    return type("Mine", (), {name: value for name, value in own.items() if value != "absent"})()


def observe(*_: Any) -> None:
    """What a policy that learns has."""


def fixed(*_: Any) -> None:
    raise AttributeError


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Joint, "Joint is a class: give a policy, Joint()"),
        (part(select="absent"), "Mine is no policy: expected a method select"),
        (part(select=None), "Mine is no policy: expected a method select"),
        (part(needs="absent"), "Mine has needs=None, expected a frozenset of held_out, losses"),
        (part(needs=["losses"]), r"Mine has needs=\['losses'\], expected a frozenset"),
        (part(needs={"losse"}), "Mine has needs={'losse'}, expected a frozenset"),
        (part(needs={"losses", "replay_references"}), "too few for the scores of 'losses'"),
        (part(observe=None, state={}), "Mine is no policy: expected a method observe"),
        (part(metrics={}), "Mine is no policy: expected a method metrics"),
        (part(needs={"held_out"}, state={}), "Mine is no policy: expected a method measured"),
        (part(needs={"held_out"}, measured=observe), "has no `state` that can be replaced"),
        (part(observe=observe), "has no `state` that can be replaced"),
        (part(observe=observe, state=property(observe)), "has no `state` that can be replaced"),
        (part(observe=observe, state={}, __setattr__=fixed), "has no `state` that can be replac"),
    ],
)
def test_what_is_no_policy_is_refused(policy, sentence):
    with pytest.raises(ValueError, match=sentence):
        needs_of(policy, reducible_loss)


@pytest.mark.parametrize("needs", [["losses"], {"references"}, frozenset(), None, "losses"])
def test_a_score_is_of_losses(needs):
    own: Any = lambda loss, _: loss  # noqa: E731
    own.needs = needs
    for score in (own, 3):
        with pytest.raises(ValueError, match=r"is no score: expected a function .*found needs="):
            needs_of(Joint(), score)
    own.needs = frozenset({"losses"})
    assert needs_of(Joint(), own) == {"losses"} and needs_of(TakeAll(), own) == frozenset()


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


def arm(name: str, **options: Any) -> Arm:
    sizes = {"num_adaptation": 400, "num_replay": 800, "batch_size": 32}
    rest: dict[str, Any] = {"multiplier": 2.0, "balance": "exact", "kappa": 1.0, "seed": 0}
    return make_arm(name, **sizes, **rest | options)


@pytest.mark.parametrize(
    ("prefix", "multiplier", "compute"),
    [("1", 2, 500), ("1/2", 2, 400), ("1/4", 2, 350), ("1/8", 2, 325), ("1/4", 4, 400)],
)
def test_scoring_costs_a_third_of_a_step_for_every_candidate_per_block(prefix, multiplier, compute):
    rod = arm("rod", prefix=prefix, multiplier=multiplier)
    assert rod.compute(300) == pytest.approx(compute)
    assert rod.scored_blocks == 32 * multiplier * rod.scored_length(64) / 64


@pytest.mark.parametrize("name", ["no_replay", "fixed_32", "base"])
def test_arms_that_score_nothing_cost_their_steps(name):
    plain = arm(name, prefix="1/4")
    assert plain == arm(name)  # the key does not touch them, so that none is trained again
    assert (plain.compute(300), plain.scored_blocks) == (300, 0)


NAMES = ("new", "a", "b")
SOURCES = tuple(
    SourceRow(name, "replay" if i else "adaptation", 100 * i, 100) for i, name in enumerate(NAMES)
)
K = 16


def pool_at(step: int, per_source: int = K) -> Pool:
    """Equally many candidates of every source, in turn."""
    source_C = np.tile(np.arange(3), per_source)
    ids = 100 * source_C + np.repeat(np.arange(per_source), 3)
    return Pool(step, ids, source_C > 0, source_C, SOURCES, seed=3)


def counts(policy: Any, step: int, **options: Any) -> list[int]:
    pool = pool_at(step, **options)
    chosen = policy.select(pool, None, K)
    assert (np.diff(chosen) > 0).all() and len(chosen) == K
    for source in range(3):  # the first of a source in the shuffled pool
        own = np.flatnonzero(pool.source_C == source)
        taken = np.isin(own, chosen)
        assert (np.diff(taken.astype(int)) <= 0).all()
    return np.bincount(pool.source_C[chosen], minlength=3).tolist()


@pytest.mark.parametrize(
    ("plan", "step", "share"),
    [
        (0.25, 0, 0.25),
        (0.25, 10**9, 0.25),
        ({0: 0.0, 100: 0.5}, 0, 0.0),
        ({0: 0.0, 100: 0.5}, 50, 0.25),
        ({"0": 0.0, "100": 0.5}, 25, 0.125),  # as a job's file has the steps
        ({0: 0.0, 100: 0.5}, 400, 0.5),
        ({10: 1.0, 20: 0.0, 30: 1.0}, 15, 0.5),
        ({10: 1.0, 20: 0.0, 30: 1.0}, 0, 1.0),
    ],
)
def test_the_share_of_replay_follows_the_plan(plan, step, share):
    policy = Schedule(replay=plan)
    assert policy.needs == frozenset()
    new, *replay = counts(policy, step)
    assert abs(sum(replay) - share * K) < 1 and new + sum(replay) == K


def test_every_source_follows_its_own_plan():
    policy = Schedule(sources={"new": 2.0, "b": {0: 0, 10: 2}, "a": {0: 2, 10: 0}})
    assert counts(policy, 0) == [8, 8, 0]
    assert counts(policy, 5) == [8, 4, 4]
    assert counts(policy, 30) == [8, 0, 8]
    assert counts(policy, 30, per_source=6) == [6, 4, 6]  # what a pool lacks, others give


def test_a_plan_may_be_a_file(tmp_path):
    shares, sources = tmp_path / "shares.csv", tmp_path / "sources.csv"
    shares.write_text("step,replay\n0,0.5\n8,0.25\n")
    sources.write_text("step,b,new,a\n0,1,1,2\n")
    assert [counts(Schedule(file=str(shares)), step)[0] for step in (0, 8)] == [8, 12]
    assert counts(Schedule(file=str(sources)), 3) == [4, 8, 4]
    shares.write_bytes(b"\xef\xbb\xbfstep, replay\r\n 0, 0.75\r\n")  # as spreadsheets have it
    assert counts(Schedule(file=str(shares)), 0)[0] == 4


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("step,replay\n0,0\n1000,0,3\n", "'1000,0,3' has 3 of 2 fields"),
        ("step,replay\n0,0\n5\n", "'5' has 1 of 2 fields"),
        ("step,replay,step\n0,0.1,5\n", "below the header 'step,replay,step'"),
        ("step,replay,replay\n0,0.1,0.5\n", "below the header 'step,replay,replay'"),
        ("step;replay\n0;0.1\n", "below the header 'step;replay'"),
        ("step\n0\n", "1 rows below the header 'step'"),
        ("step,replay\n", "0 rows below the header 'step,replay'"),
        ("", "0 rows below the header ''"),
        ("step,replay\n0,30%\n", "could not convert string to float: '30%'"),
        ("step,replay\n7,0\n7,1\n", "has a step twice: give each step once"),
        ("step,a,b\n0,0,1\n9,0,0\n", "has no weight above 0 at step 9"),
    ],
)
def test_a_table_that_means_no_plan_is_refused(table, reason, tmp_path):
    (file := tmp_path / "shares.csv").write_text(table)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        Schedule(file=str(file))
    assert str(file) in str(error.value)


@pytest.mark.parametrize("plan", [{"new": 1, "a": 1}, {"new": 1, "a": 1, "b": 1, "c": 0}])
def test_a_plan_of_other_sources_is_refused(plan):
    with pytest.raises(ValueError, match="but the run has new, a, b: give each a weight"):
        counts(Schedule(sources=plan), 0)


def test_a_bandit_by_its_three_equations():
    """Exp3 with a moving average, in plain Python."""
    policy, reward, alpha = ODM(alpha=0.5), [0.0] * 3, 0.5
    losses = {0: 3.0, 1: 1.0, 2: 2.0}
    for t in range(1, 40):

        def rate(t: int) -> float:
            return min(1 / 3, math.sqrt(math.log(3) / (3 * max(1, t))))

        weights = [math.exp(rate(t - 1) * r) for r in reward]
        probability = [(1 - 3 * rate(t)) * w / sum(weights) + rate(t) for w in weights]
        np.testing.assert_allclose(policy.probabilities(3), probability, rtol=1e-12)
        pool = pool_at(t)
        chosen = policy.select(pool, None, K)
        assert np.array_equal(chosen, policy.select(pool, None, K))  # it changes nothing
        shares = np.bincount(pool.source_C[chosen], minlength=3)
        assert (np.abs(shares - np.array(probability) * K) < 1).all()
        loss_K = np.array([losses[s] for s in pool.source_C[chosen].tolist()], dtype=np.float32)
        choice = Choice(pool, None, None, chosen)
        logged = policy.metrics(choice)
        assert logged == {
            f"rod/odm/{name}": pytest.approx(p) for name, p in zip(NAMES, probability, strict=True)
        }
        policy.observe(choice, loss_K)
        for source in {*pool.source_C[chosen].tolist()}:
            new = losses[source] / probability[source]
            reward[source] = alpha * reward[source] + (1 - alpha) * new
    assert probability[0] > probability[2] > probability[1]  # the largest loss is sampled most
    with pytest.raises(ValueError, match=r"alpha of ODM is 1.0, expected"):
        ODM(alpha=1.0)
