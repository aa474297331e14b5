"""A stateless keyed permutation of [0, size) with random access.

A shuffled list of a billion block ids takes 8 GB and must be rebuilt on every resume. A Feistel
network is a bijection for any round function, so element i of the shuffle is computed from i alone.
With b = ceil(sqrt(size)) and a = ceil(size / b), i is split into high = i // b, below a, and
low = i % b, which are updated in turns:

    round 0, 2, 4, 6:  high = (high + F(low, round key, a)) % a
    round 1, 3, 5, 7:  low  = (low + F(high, round key, b)) % b

where F hashes its first two arguments to a number below the third. This permutes [0, a * b), only
slightly more than [0, size). A result outside [0, size) is permuted again until it falls inside
(cycle walking), which gives a bijection of [0, size).

`tests/golden/permutation.json` pins the values: recorded runs depend on them.

Shape suffixes: n = any number of indices.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Ids

ROUNDS = 8
_PERSON = b"rod-perm-v1"
_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

Words = npt.NDArray[np.uint64]


def derive_key(*parts: int | str) -> int:
    """Hashes the parts of a name, such as (seed, role, epoch), to a 64-bit key.

    Integers, in decimal, and words without "/" are joined by "/", and hashed by blake2b.
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little")


def permute(index: npt.ArrayLike, size: int, key: int) -> Ids:
    """Maps every index to its place in the permutation of [0, size) given by `key`.

    Args:
        index: integers in [0, size), any shape, which the result shares.
        size: number of elements, 1 <= size <= 2**60.
        key: 64-bit key; see `derive_key`.
    """
    index = np.asarray(index, dtype=np.int64)
    size = int(size)
    assert 1 <= size <= 1 << 60, f"a permutation of {size} elements"
    assert index.size == 0 or (index.min() >= 0 and index.max() < size), f"outside [0, {size})"
    b = math.isqrt(size - 1) + 1
    a = -(-size // b)
    keys = []  # the first outputs of SplitMix64 started at `key`
    for number in range(1, ROUNDS + 1):
        z = (key + number * _GOLDEN_GAMMA) & _MASK64
        z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK64
        z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK64
        keys.append(np.uint64(z ^ (z >> 31)))
    value_n = _feistel(index.reshape(-1).astype(np.uint64), a, b, keys)
    outside = np.flatnonzero(value_n >= size)
    while outside.size:
        value_n[outside] = _feistel(value_n[outside], a, b, keys)
        outside = outside[value_n[outside] >= size]
    return value_n.astype(np.int64).reshape(index.shape)


def _feistel(value_n: Words, a: int, b: int, keys: list[np.uint64]) -> Words:
    """Permutes [0, a * b)."""
    high_n = value_n // np.uint64(b)
    low_n = value_n - high_n * np.uint64(b)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high_n = _add(high_n, low_n + key, np.uint64(a))
        else:
            low_n = _add(low_n, high_n + key, np.uint64(b))
    return high_n * np.uint64(b) + low_n


def _add(half_n: Words, z_n: Words, modulus: np.uint64) -> Words:
    """Returns (half + F) % modulus, where F hashes z (as in SplitMix64) below modulus."""
    z_n ^= z_n >> np.uint64(30)
    z_n *= np.uint64(_MULTIPLIER_1)
    z_n ^= z_n >> np.uint64(27)
    z_n *= np.uint64(_MULTIPLIER_2)
    z_n >>= np.uint64(32)
    z_n *= modulus  # the upper 32 bits as a fraction of modulus, which is below 2**31
    z_n >>= np.uint64(32)
    z_n += half_n
    # For a sum below the modulus the difference wraps around, so the smaller one is the remainder.
    return np.minimum(z_n, z_n - modulus)
