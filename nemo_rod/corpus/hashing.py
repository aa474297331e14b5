"""Two content hashes: one identifies a block, the other decides whether it is held out.

Both cover the tokens as little-endian unsigned 32-bit integers, so that any machine and any
language computes the same bytes. The *block hash* also covers the source name: it is the key under
which losses are stored. The *holdout hash* does not: the same tokens in two sources must fall on
the same side of the split, or a model would be tested on its training data.

Shape suffixes: S = tokens per block, N = blocks.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PERSON = b"rod-blk-v1"


def token_bytes(tokens: ArrayLike) -> bytes:
    """Returns tokens as little-endian u32, the input of both hashes.

    Args:
        tokens: Token ids, any integer type and shape, each in [0, 2**32).

    Raises:
        ValueError: A token is not an integer or is out of range.
    """
    array = np.asarray(tokens)
    if array.dtype == np.int32 or array.dtype == np.uint32:
        # The common, performance-critical case: only the sign needs a check, and nothing is copied.
        if array.dtype == np.int32 and array.size and array.min() < 0:
            raise ValueError(f"token ids must not be negative, found {int(array.min())}")
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, found an array of {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) >= 2**32:
        worst = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise ValueError(f"token ids must lie in [0, 2**32), found {worst}")
    return array.astype("<u4").tobytes()


def block_hash(source: str, tokens: ArrayLike) -> bytes:
    """Returns the hash of a block: blake2b of its source and its tokens (16 bytes).

    The input is the length in bytes of the UTF-8 source name as u32, the name, and the tokens [S]
    as u32, all little-endian, with the personalisation ``rod-blk-v1``. The length prefix
    distinguishes ("ab", "c...") from ("a", "bc...").

    Example:
        >>> block_hash("legal", [1, 2, 3]).hex()[:8]
        '97e4bb2d'
    """
    return _named(source, token_bytes(tokens))


def block_hashes(source: str, tokens_NS: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Returns the `block_hash` of every row, uint8 [N, 16]."""
    digests = b"".join(_named(source, data) for data in _rows(tokens_NS))
    return np.frombuffer(digests, dtype=np.uint8).reshape(len(tokens_NS), 16)


def is_holdout(tokens: ArrayLike, *, fraction: float = 0.01, seed: int = 42) -> bool:
    """Whether these tokens are held out from training (the paper's 1 % with seed 42).

    They are if the 8-byte blake2b of the tokens, salted with the seed (16 bytes, little-endian) and
    read as a little-endian u64, is below ``fraction * 2**64``. The answer depends only on the
    tokens: it does not change as the corpus grows, and is the same for every source.

    Args:
        tokens: Token ids of a block or a document, [S].
        fraction: Fraction that is held out, in [0, 1].
        seed: Seed that selects what is held out, in [0, 2**128).

    Example:
        >>> [is_holdout([block, 0], fraction=0.5) for block in range(4)]
        [False, True, False, False]
    """
    rows = np.asarray(tokens)[None]
    return bool(holdout_mask(rows, fraction=fraction, seed=seed)[0])


def holdout_mask(
    tokens_NS: NDArray[Any], *, fraction: float = 0.01, seed: int = 42
) -> NDArray[np.bool_]:
    """Returns `is_holdout` of every row, bool [N]."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"holdout_fraction must lie between 0 and 1, found {fraction}")
    limit = fraction * 2.0**64
    # Python compares an int with a float exactly, without rounding the int.
    return np.array([value < limit for value in _values(tokens_NS, seed)], dtype=bool)


def holdout_values(tokens_NS: NDArray[np.int32], *, seed: int = 42) -> NDArray[np.uint64]:
    """Returns the hash of every row that `is_holdout` compares with the fraction, uint64 [N]."""
    return np.array(_values(tokens_NS, seed), dtype=np.uint64)


def _values(tokens_NS: NDArray[Any], seed: int) -> list[int]:
    if not 0 <= seed < 2**128:
        raise ValueError(f"holdout_seed must lie in [0, 2**128), found {seed}")
    salt = seed.to_bytes(16, "little")
    digests = (hashlib.blake2b(data, digest_size=8, salt=salt) for data in _rows(tokens_NS))
    return [int.from_bytes(state.digest(), "little") for state in digests]


def _rows(tokens_NS: NDArray[Any]) -> list[memoryview]:
    if len(tokens_NS) == 0:
        return []
    data = memoryview(token_bytes(tokens_NS))
    width = len(data) // len(tokens_NS)
    return [data[i * width : (i + 1) * width] for i in range(len(tokens_NS))]


def _named(source: str, data: bytes | memoryview) -> bytes:
    name = source.encode("utf-8")
    state = hashlib.blake2b(struct.pack("<I", len(name)) + name, digest_size=16, person=_PERSON)
    state.update(data)
    return state.digest()
