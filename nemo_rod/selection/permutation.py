"""A keyed permutation of [0, size) that can be asked for any element, and keeps nothing.

A shuffled list of a billion block ids costs 8 GB and must be rebuilt on every resume. A Feistel
network is a bijection whatever its round function, so element i of the shuffle is computed from i
alone. With bits = max(2, bit length of size - 1), of which bits // 2 are high and the others low:

    round 0, 2, 4, 6:  high ^= top bits of mix64(low  + round key)
    round 1, 3, 5, 7:  low  ^= top bits of mix64(high + round key)

That permutes [0, 2**bits), less than twice as many as wanted. A result outside [0, size) is
permuted again until it falls inside (cycle walking), which is a bijection of [0, size).

`tests/golden/permutation.json` pins the values: recorded runs depend on them.

Shape suffixes: n = any number of indices.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_PERSON = b"rod-perm-v1"
_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def derive_key(*parts: int | str) -> int:
    """Hash the parts of a name, such as (seed, role, epoch), to a 64-bit key.

    Args:
        *parts: Whole numbers and words without "/"; they are written in decimal and joined by "/".

    Returns:
        The blake2b (8 bytes, person "rod-perm-v1") of that text, read as a little-endian integer.
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little")


def permute(index: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Map every index to its place in the permutation of [0, size) that `key` names.

    Args:
        index: Whole numbers in [0, size), any shape.
        size: Number of elements, 1 <= size <= 2**62.
        key: 64-bit key; see `derive_key`.

    Returns:
        int64 array of the same shape, values in [0, size).
    """
    index = np.asarray(index, dtype=np.int64)
    size = int(size)  # a NumPy integer has no bit_length
    assert 1 <= size <= 1 << 62, f"a permutation of {size} elements"
    assert index.size == 0 or (index.min() >= 0 and index.max() < size), (
        f"index outside [0, {size})"
    )
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(key)
    value = _feistel(index.reshape(-1).astype(np.uint64), bits, keys)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], bits, keys)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64).reshape(index.shape)


def _round_keys(key: int) -> list[np.uint64]:
    """Return the first outputs of SplitMix64 started at `key`."""
    keys = []
    for number in range(1, ROUNDS + 1):
        z = (key + number * _GOLDEN_GAMMA) & _MASK64
        z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK64
        z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK64
        keys.append(np.uint64(z ^ (z >> 31)))
    return keys


def _feistel(
    value_n: npt.NDArray[np.uint64], bits: int, keys: list[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Permute [0, 2**bits)."""
    high_bits, low_bits = bits // 2, bits - bits // 2
    high = value_n >> np.uint64(low_bits)
    low = value_n & np.uint64((1 << low_bits) - 1)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= _mix64(low + key) >> np.uint64(64 - high_bits)
        else:
            low ^= _mix64(high + key) >> np.uint64(64 - low_bits)
    return (high << np.uint64(low_bits)) | low


def _mix64(z_n: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of SplitMix64, in place (arithmetic modulo 2**64)."""
    z_n ^= z_n >> np.uint64(30)
    z_n *= np.uint64(_MULTIPLIER_1)
    z_n ^= z_n >> np.uint64(27)
    z_n *= np.uint64(_MULTIPLIER_2)
    z_n ^= z_n >> np.uint64(31)
    return z_n
