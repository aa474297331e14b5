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


def block_hash(source: str, tokens: ArrayLike) -> bytes:
    """Returns the hash of a block: blake2b of its source and its tokens (16 bytes).

    The input is the length in bytes of the UTF-8 source name as u32, the name, and the tokens [S]
    as u32, all little-endian, with the personalisation ``rod-blk-v1``. The length prefix
    distinguishes ("ab", "c...") from ("a", "bc...").

    Raises:
        ValueError: a token is not an integer in [0, 2**32).

    Example:
        >>> block_hash("legal", [1, 2, 3]).hex()[:8]
        '97e4bb2d'
    """
    return block_hashes(source, np.asarray(tokens)[None]).tobytes()


def block_hashes(source: str, tokens_NS: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the `block_hash` of every row, uint8 [N, 16]."""
    name = source.encode("utf-8")
    begun = hashlib.blake2b(struct.pack("<I", len(name)) + name, digest_size=16, person=_PERSON)
    digests = []
    for row in _rows(tokens_NS):
        state = begun.copy()
        state.update(row)
        digests.append(state.digest())
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(tokens_NS), 16)


def is_holdout(tokens: ArrayLike, *, fraction: float = 0.01, seed: int = 42) -> bool:
    """Whether these tokens are held out from training (the paper's 1 % with seed 42).

    They are if the 8-byte blake2b of the tokens, salted with the seed (16 bytes, little-endian) and
    read as a little-endian u64, is below ``fraction * 2**64``. The answer depends only on the
    tokens: it does not change as the corpus grows, and is the same for every source.

    Args:
        tokens: token ids of a block or a document, [S].
        fraction: fraction that is held out, in [0, 1].
        seed: seed that selects what is held out, in [0, 2**128).

    Example:
        >>> [is_holdout([block, 0], fraction=0.5) for block in range(4)]
        [False, True, False, False]
    """
    return bool(holdout_mask(np.asarray(tokens)[None], fraction=fraction, seed=seed)[0])


def holdout_mask(
    tokens_NS: NDArray[Any], *, fraction: float = 0.01, seed: int = 42
) -> NDArray[np.bool_]:
    """Returns `is_holdout` of every row, bool [N]."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"holdout_fraction must lie between 0 and 1, found {fraction}")
    limit = fraction * 2.0**64
    # Python compares an int with a float exactly, without rounding the int.
    return np.array([v < limit for v in holdout_values(tokens_NS, seed=seed).tolist()], dtype=bool)


def holdout_values(tokens_NS: NDArray[Any], *, seed: int = 42) -> NDArray[np.uint64]:
    """Returns the hash of every row that `is_holdout` compares with the fraction, uint64 [N]."""
    if not 0 <= seed < 2**128:
        raise ValueError(f"holdout_seed must lie in [0, 2**128), found {seed}")
    salt = seed.to_bytes(16, "little")
    digests = (hashlib.blake2b(row, digest_size=8, salt=salt).digest() for row in _rows(tokens_NS))
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64, copy=False)


def _rows(tokens_NS: NDArray[Any]) -> NDArray[np.uint32]:
    """Returns the tokens as little-endian u32 with contiguous rows; refuses any other value."""
    if tokens_NS.size == 0:
        return np.empty(tokens_NS.shape, dtype="<u4")
    if tokens_NS.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, found an array of {tokens_NS.dtype}")
    for worst in int(tokens_NS.min()), int(tokens_NS.max()):
        if not 0 <= worst < 2**32:
            raise ValueError(f"token ids must lie in [0, 2**32), found {worst}")
    return np.ascontiguousarray(tokens_NS, dtype="<u4")
