"""The pool and the references of a step are ready when the step before it has trained."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_estimates import References

from nemo_rod.selection import Candidates, Joint, Selector
from nemo_rod.selection.selector import Ahead

POOLS = Candidates(num_adaptation=40, num_replay=60, batch_size=4, seed=1)


class WatchedReferences(References):
    """References of which that of block `damaged` is not there.

    Attributes:
        asked: The blocks of every lookup, and the thread.
    """

    def __init__(self, damaged: int = -1) -> None:
        self.damaged = damaged
        self.asked: list[tuple[list[int], bool]] = []

    def __getitem__(self, block_ids: np.ndarray) -> np.ndarray:
        if self.damaged in block_ids:
            raise ValueError(f"the reference of block {self.damaged} is damaged")
        in_thread = threading.current_thread() is not threading.main_thread()
        self.asked.append((block_ids.tolist(), in_thread))
        return super().__getitem__(block_ids)


class Scorer:
    """Nothing costs the model anything."""

    def part_sums(self, block_ids: np.ndarray, eighths: int = 8) -> np.ndarray:
        return np.zeros((len(block_ids), eighths), dtype=np.float32)


def selector(references: References) -> Selector:
    return Selector(
        pools=POOLS, policy=Joint(), batch_size=4, block_size=16, references=references, eighths=4
    )


def test_each_pool_is_looked_up_once_and_ahead() -> None:
    references = WatchedReferences()
    one = selector(references)
    for step in range(5):
        choice = one.choose(step, Scorer())
        expected = POOLS.pool(step).block_ids
        np.testing.assert_array_equal(choice.pool.block_ids, expected)
        assert choice.score is not None
        np.testing.assert_allclose(choice.score, -expected / 100, rtol=1e-6)
    pools = [POOLS.pool(step).block_ids.tolist() for step in range(5)]
    first, *others = references.asked[:5]
    assert first == (pools[0], False)
    assert others == [(ids, True) for ids in pools[1:]]


def test_a_step_that_was_not_foreseen_is_drawn_as_well() -> None:
    one = selector(WatchedReferences())
    for step in (7, 3, 3, 4):
        choice = one.choose(step, Scorer())
        np.testing.assert_array_equal(choice.pool.block_ids, POOLS.pool(step).block_ids)


def test_what_goes_wrong_ahead_is_said_at_its_own_step() -> None:
    seen: set[int] = set(POOLS.pool(0).block_ids.tolist())
    damaged = next(i for i in POOLS.pool(1).block_ids.tolist() if i not in seen)
    one = selector(WatchedReferences(damaged))
    one.choose(0, Scorer())
    with pytest.raises(ValueError, match=f"the reference of block {damaged} is damaged"):
        one.choose(1, Scorer())


def test_the_step_after_is_prepared_while_the_caller_goes_on() -> None:
    may_go_on, began = threading.Event(), threading.Event()

    def prepare(step: int) -> int:
        if step == 1:
            began.set()
            assert may_go_on.wait(60)
        return step * step

    ahead = Ahead(prepare)
    assert ahead.take(0) == 0
    assert began.wait(60)  # while step 0 goes on
    may_go_on.set()
    assert ahead.take(1) == 1
