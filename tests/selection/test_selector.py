"""The selector: what it chooses, and the next step is prepared while this one trains."""

import threading
from typing import Any, cast

import numpy as np
import pytest

from nemo_rod.alternatives.odm import ODM
from nemo_rod.selection import Candidates, Joint, Selector, SourceRow
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.policies import LOSSES

POOLS = Candidates(num_adaptation=40, num_replay=60, batch_size=4, seed=1)


class Store:
    """What a selector asks of a store."""

    sources = (SourceRow("all", "adaptation", 0, 100),)

    def source_index(self, block_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(block_ids), dtype=np.int64)


class WatchedReferences:
    """A block costs id / 100 nats per token; the reference of block `damaged` is damaged.

    Attributes:
        lookups: The blocks of every lookup, and the thread.
    """

    length = 64

    def __init__(self, damaged: int = -1) -> None:
        self.damaged = damaged
        self.lookups: list[tuple[list[int], bool]] = []

    def __getitem__(self, block_ids: np.ndarray) -> np.ndarray:
        if self.damaged in block_ids:
            raise ValueError(f"the reference of block {self.damaged} is damaged")
        in_thread = threading.current_thread() is not threading.main_thread()
        self.lookups.append((block_ids.tolist(), in_thread))
        return (block_ids / 100).astype(np.float32)


class Scorer:
    """Nothing costs the model anything."""

    def losses(self, block_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(block_ids), dtype=np.float32)


def watched(references: WatchedReferences) -> Selector:
    return Selector(
        pools=POOLS, policy=Joint(), store=Store(), batch_size=4,  # type: ignore[arg-type]
        references=references,  # type: ignore[arg-type]
    )  # fmt: skip


def test_each_pool_is_looked_up_once_and_ahead():
    references = WatchedReferences()
    one = watched(references)
    for step in range(5):
        choice = one.choose(step, Scorer())
        expected = POOLS.pool(step).block_ids
        np.testing.assert_array_equal(choice.pool.block_ids, expected)
        assert choice.score is not None
        np.testing.assert_allclose(choice.score, -expected / 100, rtol=1e-6)
        assert choice.chosen.tolist() == np.sort(np.argsort(expected, kind="stable")[:4]).tolist()
    assert one.length == references.length and choice.metrics == {}
    pools = [POOLS.pool(step).block_ids.tolist() for step in range(5)]
    first, *others = references.lookups[:5]
    assert first == (pools[0], False)
    assert others == [(ids, True) for ids in pools[1:]]


def test_a_step_that_was_not_foreseen_is_drawn_as_well():
    one = watched(WatchedReferences())
    for step in (7, 3, 3, 4):
        choice = one.choose(step, Scorer())
        np.testing.assert_array_equal(choice.pool.block_ids, POOLS.pool(step).block_ids)


def test_what_goes_wrong_ahead_is_said_at_its_own_step():
    seen: set[int] = set(POOLS.pool(0).block_ids.tolist())
    damaged = next(i for i in POOLS.pool(1).block_ids.tolist() if i not in seen)
    one = watched(WatchedReferences(damaged))
    one.choose(0, Scorer())
    with pytest.raises(ValueError, match=f"the reference of block {damaged} is damaged"):
        one.choose(1, Scorer())


def test_the_step_after_is_prepared_while_the_caller_goes_on():
    may_go_on, began = threading.Event(), threading.Event()

    class Slow(WatchedReferences):
        def __getitem__(self, block_ids: np.ndarray) -> np.ndarray:
            if self.lookups:
                began.set()
                assert may_go_on.wait(60)
            return super().__getitem__(block_ids)

    one = watched(Slow())
    assert one.choose(0, Scorer()).pool.step == 0
    assert began.wait(60)  # while step 0 goes on
    may_go_on.set()
    assert one.choose(1, Scorer()).pool.step == 1


def drawing(rng: np.random.Generator) -> Any:
    """What chooses at random by a generator of its own."""
    return type("Mine", (), {"needs": frozenset(), "select": lambda *_: np.sort(
        rng.permutation(8)[:4])})()  # fmt: skip


@pytest.mark.parametrize("by", ["policy", "score", "estimate"])
def test_what_answers_otherwise_when_asked_again_is_refused(by):
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"policy": drawing(rng)}
    if by == "score":
        options = {"policy": Joint(), "score": lambda loss, _: loss + rng.random(len(loss))}
    if by == "estimate":
        own = {"needs": frozenset(), "estimate": lambda _, pool: rng.random(8)}
        options = {"policy": type("Mine", (Joint,), own)()}
    references: Any = WatchedReferences()
    store: Any = Store()
    one = Selector(pools=POOLS, store=store, batch_size=4, references=references, **options)
    with pytest.raises(ValueError, match=r"step 0: (Mine|Joint) or its score answers otherwise"):
        one.choose(0, Scorer())


def test_a_policy_that_is_given_twice_begins_twice():
    pools = Candidates(num_adaptation=40, num_replay=60, batch_size=4, multiplier=1)
    given, store = ODM(), cast(Any, Store())
    for _ in range(2):
        one = Selector(pools=pools, policy=given, store=store, batch_size=4)
        for step in range(2):
            one.learn(one.choose(step, Scorer()), np.ones(4, dtype=np.float32))
        assert one.policy.state["updates"] == 2  # type: ignore[attr-defined]
    assert given.state["updates"] == 0


def test_an_arm_scores_its_prefix_with_references_or_without():
    sizes = {"num_adaptation": 40, "num_replay": 60, "batch_size": 4, "seed": 0}
    options = {"balance": "exact", "kappa": 1.0, "policy_name": f"{__file__}:ByLoss"}
    store: Any = type("Blocks", (Store,), {"block_size": 64})()
    for prefix, length in (("1", 64), ("1/4", 16)):
        arm = make_arm("rod", **sizes, **options, prefix=prefix)
        assert arm.scored_blocks * 64 == arm.num_candidates * length
        assert Selector.for_arm(arm, store).length == length


class ByLoss(Joint):
    """Compares nothing with references."""

    needs = LOSSES
