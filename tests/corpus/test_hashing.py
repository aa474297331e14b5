"""Block hash and holdout: golden vectors that any other implementation can be held against."""

import hashlib
import json
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN

from nemo_rod.corpus.hashing import block_hash, block_hashes, holdout_mask, is_holdout

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_block_hash_matches_the_golden_vectors():
    for vector in json.loads((GOLDEN / "block_hash.json").read_text("utf-8"))["vectors"]:
        actual = block_hash(vector["source"], np.array(vector["tokens"], dtype=np.int64))
        assert actual.hex() == vector["hash"], vector["source"]


def test_holdout_matches_the_golden_vectors():
    golden = json.loads((GOLDEN / "holdout.json").read_text("utf-8"))
    for vector in golden["vectors"]:
        value, seed = int(vector["value"]), int(vector["seed"])
        ids = np.array(vector["tokens"], dtype=np.int64)
        # The value is not public: two fractions around it show it to the last bit of a double.
        step = np.spacing(value / 2**64)
        assert is_holdout(ids, fraction=min(1.0, value / 2**64 + step), seed=seed)
        assert not is_holdout(ids, fraction=max(0.0, value / 2**64 - step), seed=seed)
    rows = np.array([[i, i + 1, i * i % 1000] for i in range(2000)], dtype=np.int32)
    for decision in golden["decisions"]:
        mask = holdout_mask(rows, fraction=decision["fraction"], seed=int(decision["seed"]))
        assert np.flatnonzero(mask)[:20].tolist() == decision["first_held_out"]
        assert mask.sum() == decision["count_held_out"]
    for edge in golden["edges"]:
        actual = is_holdout(edge["tokens"], fraction=edge["fraction"], seed=int(edge["seed"]))
        assert actual == edge["held_out"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), tokens)
def test_block_hash_is_what_its_docstring_says(source, ids):
    name = source.encode("utf-8")
    data = struct.pack("<I", len(name)) + name + b"".join(struct.pack("<I", i) for i in ids)
    expected = hashlib.blake2b(data, digest_size=16, person=b"rod-blk-v1").digest()
    for dtype in (np.int32, np.uint32, np.int64, ">i4"):
        assert block_hash(source, np.array(ids, dtype=dtype)) == expected


@given(st.lists(st.lists(st.integers(0, 300), min_size=5, max_size=5), max_size=8))
def test_rows_are_hashed_like_single_blocks(rows):
    array = np.array(rows, dtype=np.int32).reshape(len(rows), 5)
    hashes = block_hashes("web", array)
    assert hashes.shape == (len(rows), 16) and hashes.dtype == np.uint8
    assert [h.tobytes() for h in hashes] == [block_hash("web", row) for row in rows]
    mask = holdout_mask(array, fraction=0.3, seed=7)
    assert mask.tolist() == [is_holdout(row, fraction=0.3, seed=7) for row in rows]
