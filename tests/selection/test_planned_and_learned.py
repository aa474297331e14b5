"""`Schedule` and `ODM`, against plans and a bandit that a reader can follow."""

import math
from typing import Any

import numpy as np
import pytest

from nemo_rod.alternatives.odm import ODM
from nemo_rod.selection import Choice, Pool, SourceRow
from nemo_rod.selection.schedule import Schedule

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


@pytest.mark.parametrize("plan", [{"new": 1, "a": 1}, {"new": 0, "a": 0, "b": 0}])
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
