"""A blend that follows the model, against sums, curves and a plant that a reader can follow."""

import json
import math
from typing import Any

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
from nemo_rod.selection.mix import Mix

ROWS = (
    SourceRow("laws", "adaptation", 0, 300),
    SourceRow("news", "adaptation", 300, 100),
    SourceRow("web", "replay", 400, 200),
    SourceRow("code", "replay", 600, 200),
)
STARTS = np.array([row.start for row in ROWS])
K, STEPS = 8, 1000


class Store:
    """The sources of the blocks; a block costs the base its id / 100 nats per token."""

    sources, digest, length = ROWS, "references", 16

    def source_index(self, block_ids: np.ndarray) -> np.ndarray:
        return np.searchsorted(STARTS, block_ids, side="right") - 1

    def __getitem__(self, block_ids: np.ndarray) -> np.ndarray:
        return (np.asarray(block_ids) / 100).astype(np.float32)


def pool_of(ids: Any, step: int = 0, steps: int = STEPS) -> Pool:
    ids = np.asarray(ids)
    return Pool(step, ids, ids >= 400).of(Store(), seed=5, steps=steps)  # type: ignore[arg-type]


def see(policy: Mix, ids: Any, loss: Any, step: int = 0) -> None:
    """Lets it observe a batch of blocks and their losses of training."""
    pool, loss_K = pool_of(ids, step), np.asarray(loss, dtype=np.float32)
    reference = np.where(pool.is_replay_C, Store()[pool.block_ids], np.nan).astype(np.float32)
    if "references" in policy.needs:
        reference = Store()[pool.block_ids]
    every = np.arange(len(loss_K))
    policy.observe(Choice(pool, None, None, every, reference=reference), loss_K)


MANY = np.concatenate([start + np.arange(100).repeat(10) for start in STARTS])


def means(policy: Mix, step: int = 1) -> np.ndarray:
    """The means of many estimates, by source."""
    return policy.estimate(pool_of(MANY, step)).reshape(4, -1).mean(1)


def test_the_first_step_needs_no_losses_and_takes_new_text():
    policy, pool = Mix(), pool_of(np.arange(0, 800, 20))
    score = policy.estimate(pool)
    assert not pool.is_replay_C[policy.select(pool, score, 20)].any()
    np.testing.assert_allclose(score[pool.is_replay_C], 0, atol=0.01)  # as the base would have it
    # text of a source that was never seen comes before all that is known
    see(policy, [0, 1, 2, 400], [2.5, 2.5, 2.5, 4.2])
    laws, news, *_ = means(policy)
    assert news == pytest.approx(laws, rel=0.05) and laws == pytest.approx(2.5, rel=0.05)


def test_new_text_counts_by_its_target_and_replay_by_what_the_base_knew():
    policy = Mix(target={"laws": 1.5, "news": 2.0})
    see(policy, [0, 1, 300, 301, 400, 410], [2.25, 2.75, 2.5, 2.5, 4.25, 4.25])
    # nothing is known before of new text; 0 is known of replay, as if of 8 blocks
    np.testing.assert_allclose(means(policy), [1.0, 0.5, 0.2 * 2 / 10, 0.0], atol=0.02)
    np.testing.assert_allclose(policy.state["mean"], [2.5, 2.5, 0.2 * 2 / 10, 0.0], atol=1e-6)
    see(policy, np.r_[0:200, 400:440], np.r_[np.full(200, 2.5), Store()[np.arange(400, 440)]], 1)
    see(policy, [5, 600], [3.5, 6.9], 2)
    # 128 blocks of new text are remembered, and 8 of replay
    assert policy.state["mean"][0] == pytest.approx(2.5 + 1 / 129, abs=1e-6)
    assert policy.state["mean"][3] == pytest.approx(0.9 / 9, abs=1e-6)
    score = policy.estimate(pool_of(MANY, 3)).reshape(4, -1)
    assert score[0].std() == pytest.approx((1.0 + 1 / 129) / 3, rel=0.1)  # a third of the mean
    deviation = math.sqrt(policy.state["variance"][3])
    assert score[3].std() == pytest.approx(deviation, rel=0.1)


def test_a_specialist_is_compared_block_by_block():
    policy = Mix(target={"laws": "specialist", "news": 2.0})
    see(policy, [100, 200, 300, 250], [1.5, 2.5, 2.25, np.nan])  # an unknown loss does not count
    np.testing.assert_allclose(policy.state["mean"][:2], [0.5, 2.25], atol=1e-6)
    np.testing.assert_allclose(means(policy)[:2], [0.5, 0.25], atol=0.02)
    see(policy, [0, 1], [0.25, 0.76])  # less 0 and 0.01; two blocks count 2 / (2 + 2)
    spread = ((0.25 - 0.5) ** 2 + (0.75 - 0.5) ** 2) / 2
    assert policy.state["variance"][0] == pytest.approx(spread / 2, abs=1e-6)
    drawn, score = policy.state["variance"][0] ** 0.5, policy.estimate(pool_of(MANY, 1))
    assert score.reshape(4, -1)[0].std() == pytest.approx(drawn, rel=0.1)
    np.testing.assert_array_equal(score, policy.estimate(pool_of(MANY, 1)))
    assert (score != policy.estimate(pool_of(MANY, 2))).all()  # drawn by step, and by seed
    assert (score != policy.estimate(pool_of(MANY, 1).of(Store(), seed=6))).all()


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {"replay_references"}),
        ({"target": {"laws": 1, "news": "specialist"}}, {"references"}),
        ({"target": 1.5, "forgetting": 0.1}, {"replay_references", "held_out"}),
    ],
)
def test_what_it_needs_follows_from_its_targets(options, needs):
    assert Mix(**options).needs == needs


@pytest.mark.parametrize("exponent", [0.25, 0.5])
@pytest.mark.parametrize("replayed", [0, 0.5])
def test_a_forecast_is_the_end_of_the_curve_whatever_the_replay(exponent, replayed):
    """Three quarters of the new blocks are laws: 6 of every 8 in a run of new text alone."""

    def loss(steps_worth: float) -> float:
        return 1.25 + 2 * (steps_worth + 3) ** -exponent

    policy, seen = Mix(), 0
    for step in range(300):
        replay = round(K * replayed)
        policy.metrics(Choice(pool_of([0, 300, 400], step), None, None, np.arange(3)))
        ids = np.r_[np.arange(K - replay), 400 + np.arange(replay)]
        middle = (seen + (K - replay) / 2) / 6
        see(policy, ids, np.where(ids < 400, loss(middle), 4.0), step)
        seen += K - replay
        forecast = policy.targets(pool_of([0, 300, 400], step + 1))
        if seen < 6 * STEPS // 10:
            assert forecast[0] == 0
    assert forecast[0] == pytest.approx(loss(STEPS), abs=0.005)
    assert forecast[1:].tolist() == [0, 0, 0]


def test_kappa_weighs_replay_and_does_not_keep_a_source_from_being_looked_at():
    for prefer, kappa in (("learning", 0.5), ("balance", 1), ("keeping", 2), (0.01, 0.01)):
        policy = Mix(target=1.0, prefer=prefer)
        see(policy, [0, 300, 400, 600], [3.0, 3.0, 4.5, 6.5])
        pool = pool_of(MANY[::50], step=9)
        score = policy.estimate(pool)
        np.testing.assert_allclose(policy.weigh(pool, score), Joint(kappa).weigh(pool, score))
        (first,) = policy.select(pool, score, 1)
        assert pool.source_C[first] == pool.source_C[0]  # all were seen 9 steps ago
        see(policy, [0, 300, 400], [3.0, 3.0, 4.5], step=9)
        pool = pool_of(MANY[::50], step=10)
        (first,) = policy.select(pool, policy.estimate(pool), 1)
        assert ROWS[pool.source_C[first]].name == "code"


def plant(
    *, noise: float, delay: int, jump: float, answer: float, bound: float = 0.05
) -> tuple[np.ndarray, np.ndarray]:
    """F_val over the bound, and log kappa, at 400 measurements; F_val jumps in the middle."""
    policy, rng, now = Mix(forgetting=bound), np.random.default_rng(0), 0.0
    kappas, values = [0.0] * (delay + 1), []
    for number in range(400):
        before = kappas[-1 - delay]
        rest = 3 * bound * (jump if number >= 200 else 1) * math.exp(-answer * before)
        now += (rest - now) / 2
        values.append(now)
        measured = max(0.0, now * (1 + noise * rng.standard_normal()))
        policy.measured(number, {"validation/forgetting": measured})
        kappas.append(float(policy.state["dial"][0]))
    return np.array(values) / bound, np.array(kappas[delay + 1 :])


@pytest.mark.parametrize("answer", [0.4, 0.8])
@pytest.mark.parametrize(
    ("noise", "delay", "jump"),
    [(0, 0, 1), (0, 0, 3), (0.05, 0, 3), (0.1, 0, 1), (0.2, 0, 1), (0, 3, 1), (0.05, 3, 3),
     (0.1, 2, 1 / 3), (0, 5, 3), (0.1, 5, 1 / 3)],
)  # fmt: skip
def test_the_bound_is_kept_without_hunting(noise, delay, jump, answer):
    value, log_kappa = plant(noise=noise, delay=delay, jump=jump, answer=answer)
    for part in (slice(160, 200), slice(360, 400)):
        assert (value[part] > 0.6).all() and (value[part] < 1.02).all()
        # what kappa does to forgetting stays within a few per cent, and within the noise
        moved = answer * np.ptp(log_kappa[part])
        assert moved < 0.05 + noise
        if not noise:
            assert (np.diff(log_kappa[part][-10:]) == 0).all()


def test_a_rise_counts_before_it_reaches_the_bound():
    policy = Mix(forgetting=0.1)
    policy.measured(0, {"validation/forgetting": 0.04})
    assert policy.state["dial"][0] < 0  # 0.08 is expected: there is room to learn
    policy.measured(1, {"validation/forgetting": 0.08})
    assert policy.state["dial"][0] > 0  # 0.16 is expected
    before = policy.state["dial"].copy()
    policy.measured(2, {"train/loss": 2.0})
    np.testing.assert_array_equal(policy.state["dial"], before)


def test_targets_of_other_sources_and_a_run_without_an_end_are_refused():
    with pytest.raises(ValueError, match="the new sources of the run are laws, news: give each"):
        Mix(target={"laws": 1.0}).estimate(pool_of(MANY))
    with pytest.raises(ValueError, match="whose length is not known: give a number"):
        Mix().estimate(pool_of(MANY, steps=0))


def test_the_record_brings_the_state_back_to_the_bit(tmp_path):
    pools = Candidates(num_adaptation=400, num_replay=400, batch_size=K, seed=3)
    header = CurriculumHeader(
        num_candidates=pools.size, num_chosen=K, block_size=16, store=Store.digest, tokenizer="t",
        references="r", config="c", seed=3, sources=ROWS, scored=True,
    )  # fmt: skip

    def selector(policy: Mix) -> Selector:
        return Selector(
            pools=pools, policy=policy, store=Store(), batch_size=K, seed=3, steps=40,
            references=Store(),
        )  # fmt: skip

    rng, options = np.random.default_rng(2), {"target": {"laws": "auto", "news": 2.0}}
    one, others = selector(Mix(**options, forgetting=0.1)), []
    curriculum = Curriculum.create(tmp_path / "curriculum.rod", header)
    for step in range(30):
        choice = one.choose(step, scorer=None)  # type: ignore[arg-type]  # nothing is scored
        assert choice.is_estimated and choice.is_pending and choice.loss is None
        losses = Store()[choice.block_ids] + rng.gamma(8.0, 0.05, K).astype(np.float32)
        choice = one.learn(choice, losses)
        curriculum.append(choice)
        row = {"step": step, "train/loss": 2.0}
        if step % 3 == 2:
            row["validation/forgetting"] = rng.random() / 5
            one.tell_policy(row, lambda find: find())
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        others.append(choice)
    again = selector(Mix(**options, forgetting=0.1))
    for _ in range(2):  # again as from a checkpoint that a loop goes back to
        assert again.resume(30, lambda: [(curriculum.path, 30)], lambda find: find()) == 0
    assert again.policy.state.keys() == one.policy.state.keys()  # type: ignore[attr-defined]
    for name, value in one.policy.state.items():  # type: ignore[attr-defined]
        np.testing.assert_array_equal(again.policy.state[name], value)  # type: ignore[attr-defined]
    assert one.policy.state["dial"][0] != 0  # type: ignore[attr-defined]
    np.testing.assert_array_equal(
        one.choose(30, scorer=None).score,  # type: ignore[arg-type]
        again.choose(30, scorer=None).score,  # type: ignore[arg-type]
    )
