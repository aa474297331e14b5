"""Candidate pools, and the keyed permutation that deals them: golden files and plain oracles."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN

from nemo_rod.selection.candidates import Candidates, retention_for_share
from nemo_rod.selection.permutation import derive_key, permute

PINNED = json.loads((GOLDEN / "candidates.json").read_text())


def shuffled(seed, name, epoch, size):
    """The whole permutation of an epoch, as a list."""
    return permute(np.arange(size), size, derive_key(seed, name, epoch)).tolist()


def oracle_pool(c: Candidates, step: int) -> list[int]:
    """The pool as golden/candidates.json describes it: whole epochs, laid end to end."""
    a, r, num = c.num_adaptation, c.num_replay, round(c.multiplier * c.batch_size)
    if c.balance == "exact":
        num_a = math.ceil(num / 2)
        parts = []
        for name, size, first, count in (("adaptation", a, 0, num_a), ("replay", r, a, num // 2)):
            row = []
            for epoch in range((step + 1) * count // size + 1):
                row += [first + i for i in shuffled(c.seed, name, epoch, size)]
            parts += row[step * count : (step + 1) * count]
        return [parts[i] for i in shuffled(c.seed, "pool", step, num)]
    in_use = a if c.balance == "expected" else round(c.retention * r)
    row, start = [], step * num
    for epoch in range((start + num) // (a + in_use) + 1):
        slots = range(epoch * in_use, (epoch + 1) * in_use) if in_use > r else range(in_use)
        passes = {n: shuffled(c.seed, "subsample", n, r) for n in {s // r for s in slots}}
        blocks = [*range(a), *(a + passes[s // r][s % r] for s in slots)]
        row += [blocks[i] for i in shuffled(c.seed, "stream", epoch, a + in_use)]
    return row[start : start + num]


@given(st.data(), st.integers(0, 30))
def test_what_is_drawn_is_the_union_of_the_pools(data, steps):
    c = data.draw(candidates())
    expected = {i for step in range(steps) for i in c.pool(step).block_ids.tolist()}
    drawn = c.drawn(steps)
    assert len(drawn) == c.num_adaptation + c.num_replay
    assert np.flatnonzero(drawn).tolist() == sorted(expected)


@st.composite
def candidates(draw, balances=("exact", "expected", "corpus"), retention=3):
    balance = draw(st.sampled_from(balances))
    return Candidates(
        num_adaptation=draw(st.integers(1, 40)),
        num_replay=draw(st.integers(1, 60)),
        batch_size=draw(st.integers(1, 12)),
        multiplier=draw(st.sampled_from([1.0, 1.5, 2.0, 2.7, 4.0])),
        balance=balance,
        retention=draw(st.floats(0, retention)) if balance == "corpus" else 1.0,
        seed=draw(st.integers(-(2**40), 2**40)),
    )


@pytest.mark.parametrize("case", PINNED["cases"], ids=lambda case: case["candidates"]["balance"])
def test_golden_pools(case):
    source = Candidates(**case["candidates"])
    for step, block_ids in case["pools"].items():
        assert source.pool(int(step)).block_ids.tolist() == block_ids


@given(source=candidates(), steps=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_pools_are_those_described_in_any_order(source, steps):
    for step in steps:
        pool = source.pool(step)
        assert pool.step == step
        assert pool.block_ids.dtype == np.int64 and pool.is_replay_C.dtype == bool
        assert pool.block_ids.tolist() == oracle_pool(source, step)
        assert np.array_equal(pool.is_replay_C, pool.block_ids >= source.num_adaptation)


@pytest.mark.parametrize("replay", [False, True])
def test_one_role_alone(replay):
    sizes = {"num_adaptation": 0 if replay else 9, "num_replay": 9 if replay else 0}
    source = Candidates(**sizes, batch_size=9, multiplier=1, balance="corpus")
    assert sorted(source.pool(0).block_ids.tolist()) == list(range(9))
    assert (source.pool(5).is_replay_C == replay).all()


def test_a_huge_store_and_a_late_step():
    source = Candidates(num_adaptation=10**9, num_replay=3 * 10**9, batch_size=512)
    pool = source.pool(10**9)
    assert len(np.unique(pool.block_ids)) == 1024
    assert pool.block_ids.min() >= 0 and pool.block_ids.max() < 4 * 10**9


@given(a=st.integers(1, 10**6), r=st.integers(1, 10**6), share=st.floats(0, 0.99))
def test_retention_gives_the_share(a, r, share):
    needed = share * a / (1 - share)
    retention = retention_for_share(share, a, r)
    assert abs(round(retention * r) - needed) <= 0.5 + 1e-6


@given(a=st.integers(1, 10**6), r=st.integers(0, 10**6))
def test_the_whole_corpus_is_within_reach(a, r):
    assert round(retention_for_share(r / (a + r), a, r) * r) == r


PERMUTED = json.loads((GOLDEN / "permutation.json").read_text())
MASK64 = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    return ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64


def permute_one(index: int, size: int, key: int) -> int:
    """The permutation as golden/permutation.json describes it, on Python's integers."""
    b = math.ceil(math.sqrt(size)) if size < 10**12 else math.isqrt(size - 1) + 1
    a = (size + b - 1) // b
    round_keys = [mix((key + n * 0x9E3779B97F4A7C15) & MASK64) for n in range(1, 9)]
    round_keys = [z ^ (z >> 31) for z in round_keys]

    def below(modulus, z):
        return (mix(z & MASK64) >> 32) * modulus >> 32

    value = index
    while True:
        high, low = divmod(value, b)
        for number, round_key in enumerate(round_keys):
            if number % 2 == 0:
                high = (high + below(a, low + round_key)) % a
            else:
                low = (low + below(b, high + round_key)) % b
        value = high * b + low
        if value < size:
            return value


@pytest.mark.parametrize(
    "case", PERMUTED["keys"], ids=lambda case: "/".join(map(str, case["parts"]))
)
def test_golden_keys(case):
    assert f"{derive_key(*case['parts']):016x}" == case["key"]


@pytest.mark.parametrize("case", PERMUTED["permutations"], ids=lambda case: str(case["size"]))
def test_golden_permutations(case):
    key = int(case["key"], 16)
    assert permute(case["index"], case["size"], key).tolist() == case["value"]


@given(size=st.integers(1, 1 << 60), key=st.integers(0, MASK64), data=st.data())
def test_a_permutation_is_the_one_described(size, key, data):
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    value = permute(index, size, key)
    assert value.dtype == np.int64
    assert value.tolist() == [permute_one(i, size, key) for i in index]


def test_shape_is_kept_and_nothing_is_changed():
    index = np.arange(12).reshape(3, 4)
    value = permute(index, 100, 5)
    assert value.shape == (3, 4)
    assert np.array_equal(index, np.arange(12).reshape(3, 4))
    assert np.array_equal(value.reshape(-1), permute(np.arange(12), 100, 5))
    assert permute(7, 100, 5).shape == ()
    assert permute([], 100, 5).shape == (0,)
    assert np.array_equal(permute([3], np.int64(100), 5), permute([3], 100, 5))


@pytest.mark.parametrize("index", [[-1], [10], [3, 10]])
def test_an_index_outside_is_the_programmers_mistake(index):
    with pytest.raises(AssertionError, match="outside"):
        permute(index, 10, 1)
