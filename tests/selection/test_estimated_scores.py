"""Scores estimated from averages by source, against sums that a reader can follow."""

import numpy as np
import pytest

from nemo_rod.selection import (
    Candidates,
    Choice,
    Curriculum,
    CurriculumHeader,
    Joint,
    Pool,
    Selector,
    SourceRow,
)
from nemo_rod.selection.estimated_scores import MEMORY_BLOCKS, EstimatedScores

STARTS = np.array([0, 100, 150])  # one adaptation source, two of replay
SIZE, BATCH = 16, 8
BLOCKS = 200


class References:
    """A block costs its references id / 100 nats per token."""

    digest = "references"

    def __getitem__(self, block_ids: np.ndarray) -> np.ndarray:
        return (np.asarray(block_ids) / 100).astype(np.float32)


class Store:
    """The sources of the blocks."""

    sources = (
        SourceRow("new", "adaptation", 0, 100),
        SourceRow("a", "replay", 100, 50),
        SourceRow("b", "replay", 150, 50),
    )

    def source_index(self, block_ids: np.ndarray) -> np.ndarray:
        return np.searchsorted(STARTS, block_ids, side="right") - 1


def averages(*, every: int = 0) -> EstimatedScores:
    return EstimatedScores(Joint(), every)


def see(estimator: EstimatedScores, step: int, ids: np.ndarray, rho: np.ndarray) -> None:
    """Lets it observe a scoring pass of some blocks."""
    score = np.asarray(rho, dtype=np.float32)
    choice = Choice(pool_of(np.asarray(ids), step), score, score, np.array([0]))
    estimator.observe(choice, score[:1])


def fed() -> EstimatedScores:
    """Scores of source s: mean s + 1, standard deviation (s + 1) / 10, seen at step 0."""
    estimator, rng = averages(), np.random.default_rng(0)
    for source, start in enumerate(STARTS):
        ids = start + np.arange(40)
        see(estimator, 0, ids, source + 1 + (source + 1) / 10 * rng.standard_normal(40))
    return estimator


def pool_of(ids: np.ndarray, step: int = 1, seed: int = 5) -> Pool:
    return Pool(step, ids, ids >= STARTS[1]).of(Store(), seed)  # type: ignore[arg-type]


def test_mean_and_variance_are_those_of_the_first_blocks_seen():
    estimator = averages()
    ids, rho = np.array([3, 120, 7, 130]), np.array([1.0, 0.5, 2.0, 0.25])
    see(estimator, 0, ids, rho)
    np.testing.assert_allclose(estimator.state["mean"], [1.5, 0.375, np.nan], atol=1e-6)
    np.testing.assert_allclose(estimator.state["variance"], [0.25, 0.125**2, 0], atol=1e-6)


def test_new_blocks_count_as_many_of_the_memory():
    """A source's mean moves by n / (memory + n) towards that of n new blocks, once it is full."""
    estimator = averages()
    many = np.arange(40)
    see(estimator, 0, many, np.ones(40))
    see(estimator, 1, np.array([1, 2]), np.array([2.0, 4.0]))
    weight = 2 / (MEMORY_BLOCKS + 2)
    mean = 1 + weight * (3 - 1)
    assert estimator.state["mean"][0] == pytest.approx(mean, abs=1e-6)
    spread = ((2 - mean) ** 2 + (4 - mean) ** 2) / 2
    assert estimator.state["variance"][0] == pytest.approx(weight * spread, abs=1e-6)


def test_losses_that_are_not_known_do_not_count():
    estimator, other = averages(), averages()
    ids = np.array([1, 2, 3])
    see(estimator, 0, ids, np.array([np.nan, 5.0, np.inf], dtype=np.float32))
    see(other, 0, ids[1:2], np.array([5.0], dtype=np.float32))
    np.testing.assert_array_equal(estimator.state["mean"], other.state["mean"])


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (1, [0, 1, 2, 3, 4, 5]), (3, [0, 3])])
def test_the_first_pool_is_scored_and_every_so_many_after(every, due):
    estimator = averages(every=every)
    scored = []
    for step in range(6):
        if estimator.is_due(step):
            scored.append(step)
            see(estimator, step, np.array([0]), np.array([1.0]))
    assert scored == due


def test_guesses_vary_like_the_source():
    estimator = fed()
    ids = np.repeat(STARTS, 4000)
    score = estimator.estimate(pool_of(ids)).reshape(3, 4000)
    np.testing.assert_allclose(score.mean(axis=1), estimator.state["mean"], atol=0.02)
    np.testing.assert_allclose(score.std(axis=1), np.sqrt(estimator.state["variance"]), rtol=0.05)


def test_guesses_follow_from_seed_and_step():
    ids = np.arange(0, BLOCKS, 5)
    first = fed().estimate(pool_of(ids))
    np.testing.assert_array_equal(first, fed().estimate(pool_of(ids)))
    assert (first != fed().estimate(pool_of(ids, seed=6))).all()
    assert (first != fed().estimate(pool_of(ids, step=2))).all()


def test_a_source_that_is_not_chosen_is_looked_at_now_and_then():
    estimator = averages()
    for source, start in enumerate(STARTS):  # the last source is far behind
        ids = start + np.arange(20)
        see(estimator, 0, ids, np.full(20, 2.0 - source))
    ids = np.concatenate([np.arange(10), 100 + np.arange(10), 150 + np.arange(10)])
    seen = []
    for step in range(1, 13):
        chosen = ids[np.argsort(-estimator.estimate(pool_of(ids, step)), kind="stable")[:4]]
        seen.append(sorted({int(s) for s in Store().source_index(chosen)}))
        see(estimator, step, chosen, np.where(chosen < 100, 2.0, 0.0))
    # a block of the one that is older than there are sources comes in, and of one alone
    looked_at = {4: [0, 1], 5: [0, 2], 8: [0, 1], 9: [0, 2], 12: [0, 1]}
    assert seen == [looked_at.get(step, [0]) for step in range(1, 13)]


def test_what_was_recorded_brings_the_averages_back(tmp_path):
    pools = Candidates(num_adaptation=100, num_replay=100, batch_size=BATCH, seed=3)
    header = CurriculumHeader(
        num_candidates=pools.size, num_chosen=BATCH, block_size=SIZE, store="s", tokenizer="t",
        references="r", config="c", seed=3, sources=Store.sources, scored=True,
    )  # fmt: skip
    estimator, rng = averages(every=4), np.random.default_rng(2)

    def select_by(policy: EstimatedScores) -> Selector:
        return Selector(
            pools=pools, policy=policy, store=Store(), batch_size=BATCH, seed=3,
            references=References(),
        )  # fmt: skip

    selector = select_by(estimator)
    curriculum = Curriculum.create(tmp_path / "curriculum.rod", header)

    class Scorer:
        calls = 0

        def losses(self, block_ids: np.ndarray) -> np.ndarray:
            self.calls += 1
            return rng.gamma(8.0, 0.5, len(block_ids)).astype(np.float32)

    scorer = Scorer()
    for step in range(10):
        choice = selector.choose(step, scorer)
        assert choice.is_estimated == (step % 4 != 0)
        if not choice.is_estimated:
            choice = selector.learn(choice)
        if choice.is_estimated:
            assert choice.loss is None and choice.is_pending
            losses = rng.gamma(8.0, 0.5, BATCH).astype(np.float32)
            choice = selector.learn(choice, losses)
            known = np.isfinite(choice.loss)
            assert np.flatnonzero(known).tolist() == choice.chosen.tolist()
            np.testing.assert_array_equal(choice.loss[known], losses)
        elif step:  # what estimates would have chosen of the same pool
            assert 0 <= choice.metrics["rod/averages/overlap"] <= 1
        curriculum.append(choice)
    assert scorer.calls == 3
    again = averages(every=4)
    select_by(again).resume(tmp_path / "curriculum.rod", lambda read: read())
    for name, value in estimator.state.items():
        np.testing.assert_array_equal(again.state[name], value, err_msg=name)
