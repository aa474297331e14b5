"""The keyed permutation: a bijection, the one its golden file pins, and a real shuffle."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN

from nemo_rod.selection.permutation import derive_key, permute

PINNED = json.loads((GOLDEN / "permutation.json").read_text())
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


@pytest.mark.parametrize("case", PINNED["keys"], ids=lambda case: "/".join(map(str, case["parts"])))
def test_golden_keys(case):
    assert f"{derive_key(*case['parts']):016x}" == case["key"]


@pytest.mark.parametrize("case", PINNED["permutations"], ids=lambda case: str(case["size"]))
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
