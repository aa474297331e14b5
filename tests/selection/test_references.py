"""Reference losses: writing under crashes, complete or refused, lookups that notice damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.selection.references import (
    References,
    ReferenceWriter,
    compact,
    logged_ids,
    remove_logs,
)
from nemo_rod.selection.references.folder import (
    ReferenceManifest,
    holds,
    record_type,
    role_manifest,
)
from nemo_rod.selection.references.lookup import HashIndex

S = 64
LENGTHS = (64, 32, 16)
RECORD = record_type(LENGTHS)


def refused(sentence: str) -> AbstractContextManager[object]:
    return pytest.raises(ValueError, match=sentence)


@dataclass
class ArrayStore:
    """Blocks without tokens: their hashes are those of their ids."""

    count: int
    digest: str = "store-1"
    tokenizer_fingerprint: str = "tokenizer-1"
    block_size: int = S
    changed: set = field(default_factory=set)

    def __len__(self):
        return self.count

    def hashes(self, block_ids):
        texts = [f"{i}{'*' * (i in self.changed)}".encode() for i in block_ids.tolist()]
        digests = [hashlib.blake2b(text, digest_size=16).digest() for text in texts]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def manifest(start, stop, **values):
    default = {"model": "model-1", "tokenizer": "tokenizer-1", "store": "store-1"}
    default |= {
        "block_size": S,
        "lengths": LENGTHS,
        "start": start,
        "stop": stop,
        "precision": "fp32",
    }
    return ReferenceManifest(**(default | values))


def losses_of(block_ids):
    """Losses that only these blocks have, float32 [C, 3]."""
    ids = np.asarray(block_ids, dtype=np.float64)[:, None]
    return (10 + np.sin(ids * 8 + np.arange(3))).astype(np.float32)


def write(folder, rank, block_ids, m, store=None, losses=None):
    ids = np.asarray(block_ids)
    store = store or ArrayStore(m.stop)
    with ReferenceWriter(folder, rank, manifest=m, sync_every=3) as writer:
        writer.append(ids, losses_of(ids) if losses is None else losses, store.hashes(ids))


def complete(folder, start, stop, **values):
    m = manifest(start, stop, **values)
    for rank in range(3):
        write(folder, rank, range(start + rank, stop, 3), m)
    compact(folder, manifest=m, hashes=ArrayStore(stop).hashes)
    return folder


def check(folder, ids, store=None):
    """Compares the references of a folder with those that were written."""
    losses = References.open([folder], store or ArrayStore(len(ids)))[ids]
    assert np.array_equal(losses, losses_of(ids)[:, 0])


# --- writing


def test_ranks_write_and_everything_is_found(tmp_path):
    complete(tmp_path / "specialist", 0, 20)
    complete(tmp_path / "base", 20, 50, model="model-2")
    store = ArrayStore(50)
    references = References.open([tmp_path / "base", tmp_path / "specialist"], store)
    ids = np.random.default_rng(0).integers(0, 50, 200)
    expected_C = losses_of(ids)[:, 0]
    assert len(references) == 50 and references.block_size == S
    assert [m.model for m in references.manifests] == ["model-1", "model-2"]
    assert np.array_equal(references[ids], expected_C)
    assert references[ids].dtype == np.float32
    assert np.array_equal(references[[]], np.empty(0, np.float32))
    folders = [tmp_path / "base", tmp_path / "specialist"]
    for column, length in enumerate(LENGTHS):
        beginning = References.open(folders, store, length=length)
        assert beginning.length == length and beginning.digest == references.digest
        assert np.array_equal(beginning[ids], losses_of(ids)[:, column])
    with refused(r"of the first 64, 32, 16 tokens of a block, but candidates are scored by 8: "):
        References.open(folders, store, length=8)
    assert np.array_equal(references.find(store.hashes(ids)), ids)
    references.verify()
    again = References.open([tmp_path / "specialist", tmp_path / "base"], store)
    assert again.digest == references.digest
    assert not list(tmp_path.glob("*/rank-*.log")) and not list(tmp_path.glob("*/.*"))


def test_the_digest_names_the_content_not_the_way_there(tmp_path):
    complete(tmp_path / "a", 0, 12)
    m = manifest(0, 12)
    write(tmp_path / "b", 7, range(11, -1, -1), m)
    compact(tmp_path / "b", manifest=m, hashes=ArrayStore(12).hashes)
    complete(tmp_path / "c", 0, 12, model="model-2")
    a, b, c = (References.open([tmp_path / name]).digest for name in "abc")
    assert a == b != c
    assert (tmp_path / "a" / "loss.npy").read_bytes() == (tmp_path / "b" / "loss.npy").read_bytes()


def test_a_writer_goes_on_where_it_was(tmp_path):
    m = manifest(0, 30)
    write(tmp_path, 0, [4, 2], m)
    write(tmp_path, 1, [9, 4], m)
    assert ReferenceWriter(tmp_path, 0, manifest=m).done.tolist() == [2, 4]
    assert logged_ids(tmp_path, m).tolist() == [2, 4, 9]
    write(tmp_path, 0, [1], m)
    assert ReferenceWriter(tmp_path, 0, manifest=m).done.tolist() == [1, 2, 4]
    assert logged_ids(tmp_path / "none", m).tolist() == []


def test_a_log_cut_within_its_last_record(tmp_path):  # at every byte: test_record_log.py
    m, store = manifest(0, 6), ArrayStore(6)
    write(tmp_path / "whole", 0, range(6), m)
    whole = (tmp_path / "whole" / "rank-00000.log").read_bytes()
    for end in range(len(whole) - RECORD.itemsize - 4, len(whole)):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / "rank-00000.log").write_bytes(whole[:end])
        with refused(r"no valid loss of 1 of 6 blocks .* is block 5: score"):
            compact(folder, manifest=m, hashes=store.hashes)
        with ReferenceWriter(folder, 0, manifest=m) as writer:
            assert writer.done.tolist() == [0, 1, 2, 3, 4]
            writer.append([5], losses_of([5]), store.hashes(np.array([5])))
        assert (folder / "rank-00000.log").read_bytes() == whole
        compact(folder, manifest=m, hashes=store.hashes)
        check(folder, range(6))
        shutil.rmtree(folder)


def test_a_flipped_bit_in_a_log_costs_its_block_only(tmp_path):
    m, store = manifest(0, 6), ArrayStore(6)
    write(tmp_path, 0, range(6), m)
    path = tmp_path / "rank-00000.log"
    data = bytearray(path.read_bytes())
    data[-4 * (RECORD.itemsize + 4) + 20] ^= 1  # in the losses of block 2
    path.write_bytes(data)
    assert logged_ids(tmp_path, m).tolist() == [0, 1, 3, 4, 5]
    with refused(r"no valid loss of 1 of 6 blocks .* is block 2: score again"):
        compact(tmp_path, manifest=m, hashes=store.hashes)
    write(tmp_path, 1, [2], m)
    compact(tmp_path, manifest=m, hashes=store.hashes)
    check(tmp_path, range(6))


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1)])
def test_copies_that_agree_are_one_and_copies_that_do_not_are_refused(tmp_path, ranks):
    m, store = manifest(0, 4), ArrayStore(4)
    write(tmp_path / "same", ranks[0], range(4), m)
    write(tmp_path / "same", ranks[1], [2, 2, 0], m)
    compact(tmp_path / "same", manifest=m, hashes=store.hashes)
    other = losses_of([2])
    other[0, 2] = np.nextafter(other[0, 2], np.float32(99))
    write(tmp_path / "other", ranks[0], range(4), m)
    write(tmp_path / "other", ranks[1], [2], m, losses=other)
    with refused("holds another loss for block 2 than was read before"):
        compact(tmp_path / "other", manifest=m, hashes=store.hashes)
    assert list((tmp_path / "other").glob("rank-*.log"))  # what was written is still there


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_are_refused(tmp_path, bad, monkeypatch):
    m = manifest(0, 4)
    losses = losses_of(range(4))
    losses[2, 1] = bad
    with refused(r"scoring pass has losses that are not finite .* block 2: "):
        write(tmp_path, 0, range(4), m, losses=losses)
    assert logged_ids(tmp_path, m).tolist() == []
    # Also in logs that were written without that check.
    with monkeypatch.context() as patch:
        patch.setattr("nemo_rod.selection.references.rank_log.check_losses", lambda *_: None)
        write(tmp_path, 0, range(4), m, losses=losses)
    with refused(r"rank-00000.log has losses that are not finite .* block 2: "):
        compact(tmp_path, manifest=m, hashes=ArrayStore(4).hashes)


def test_blocks_that_are_missing_foreign_or_outside(tmp_path):
    m, store = manifest(10, 14), ArrayStore(14)
    with refused("no valid loss of 4 of 4 blocks in its 0 logs"):
        compact(tmp_path, manifest=m, hashes=store.hashes)
    write(tmp_path, 0, [10, 13], m)
    with refused(r"no valid loss of 2 of 4 blocks .* the first is block 11"):
        compact(tmp_path, manifest=m, hashes=store.hashes)
    for outside in (9, 14, -1):
        with refused(r"but the manifest is of blocks \[10, 14\)"):
            write(tmp_path, 0, [outside], m)
    write(tmp_path, 1, [11, 12], m)
    rebuilt = ArrayStore(14, changed={12})
    with refused(r"rank-00001.log scored block 12 with another content"):
        compact(tmp_path, manifest=m, hashes=rebuilt.hashes)
    compact(tmp_path, manifest=m, hashes=store.hashes)
    with refused("is complete already: use it, or remove it"):
        compact(tmp_path, manifest=m, hashes=store.hashes)


def test_compacting_begins_again_after_a_crash(tmp_path):
    m, store = manifest(0, 4), ArrayStore(4)
    write(tmp_path, 0, range(4), m)
    (tmp_path / ".compact.tmp").mkdir()
    (tmp_path / ".compact.tmp" / "hash.npy").write_bytes(b"half")
    (tmp_path / "loss.npy").write_bytes(b"moved before the crash")
    with refused("does not exist: run `nemo-rod reference` to the end"):
        References.open([tmp_path], store)
    compact(tmp_path, manifest=m, hashes=store.hashes)
    check(tmp_path, range(4))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("check.npy", "hash.npy", "loss.npy", "manifest.json")
    ]


def test_what_a_crash_after_compacting_leaves_is_removed(tmp_path):
    with pytest.raises(AssertionError, match="still needs its logs"):
        remove_logs(tmp_path)
    complete(tmp_path, 0, 4)
    whole = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    (tmp_path / ".compact.tmp").mkdir()
    (tmp_path / "rank-00003.log").write_bytes(b"not needed")
    (tmp_path / ".rank-00004.log.123.tmp").write_bytes(b"of a writer that was killed")
    for _ in range(2):
        remove_logs(tmp_path)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == whole


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "x"), ("tokenizer", "x"), ("store", "x"), ("lengths", (64,)), ("stop", 9)],
)
def test_a_log_of_something_else_is_refused_by_name(tmp_path, name, value):
    m = manifest(0, 4)
    write(tmp_path, 0, range(4), m)
    other = replace(m, **{name: value})
    expected = re.escape(repr(value))
    sentence = f"rank-00000.log was written with {name} .* \\(expected {expected}\\): finish it"
    for use in (
        lambda: ReferenceWriter(tmp_path, 0, manifest=other),
        lambda: logged_ids(tmp_path, other),
        lambda: compact(tmp_path, manifest=other, hashes=ArrayStore(9).hashes),
    ):
        with refused(sentence):
            use()


def test_manifests_that_make_no_sense():
    for lengths in ((), (65,), (0,), (32, 64), (64, 64), (64, "32")):
        with refused(r"lengths is .*, expected"):
            manifest(0, 4, lengths=lengths)
    with refused(r"block ids \[4, 4\) hold no block"):
        manifest(4, 4)


SCORE_FOREVER = """
import sys
from test_references import *
m = manifest(0, 4000)
writer = ReferenceWriter(sys.argv[1], 0, manifest=m, sync_every=64)
left = np.setdiff1d(np.arange(4000), writer.done)
store = ArrayStore(4000)
for first in range(0, len(left), 7):
    ids = left[first : first + 7]
    writer.append(ids, losses_of(ids), store.hashes(ids))
    print(ids[-1], flush=True)
"""


def test_killed_again_and_again(tmp_path):
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCORE_FOREVER, str(tmp_path)]
    m, killed = manifest(0, 4000), 0
    while len(logged_ids(tmp_path, m)) < 4000:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | path)
        reported = [int(line) for line, _ in zip(worker.stdout, range(250), strict=False)]
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        assert np.isin(reported, logged_ids(tmp_path, m)).all()
        killed += 1
    assert killed >= 2
    compact(tmp_path, manifest=m, hashes=ArrayStore(4000).hashes)
    check(tmp_path, np.arange(4000))


# --- reading


def test_foreign_references_are_refused_by_name(tmp_path):
    complete(tmp_path, 0, 8)
    for store, sentence in (
        (ArrayStore(8, digest="store-2"), "is of block store 'store-1', expected 'store-2'"),
        (ArrayStore(8, tokenizer_fingerprint="t2"), "is of tokenizer 'tokenizer-1', expected 't2'"),
        (ArrayStore(8, block_size=128), "is of block size 64, expected 128"),
    ):
        with refused(f"manifest.json {sentence}: score again"):
            References.open([tmp_path], store)


def test_folders_must_fit_each_other_and_cover_the_store(tmp_path):
    for name, start, stop, values in (
        ("a", 0, 8, {}),
        ("b", 7, 12, {}),
        ("c", 9, 12, {}),
        ("d", 8, 12, {"tokenizer": "tokenizer-2"}),
    ):
        complete(tmp_path / name, start, stop, **values)
    for names, store, sentence in (
        ("ba", ArrayStore(12), "both have references of block 7: name one"),
        ("ac", ArrayStore(12), "block 8 of 12 has no reference; there are those of"),
        ("a", ArrayStore(12), "block 8 of 12 has no reference"),
        ("c", ArrayStore(12), "block 0 of 12 has no reference"),
        ("ad", None, "is of tokenizer 'tokenizer-2', expected 'tokenizer-1'"),
        ("", ArrayStore(12), "no folder of references was given"),
        ("x", ArrayStore(12), r"x/manifest.json does not exist: run `nemo-rod reference`"),
    ):
        with refused(sentence):
            References.open([tmp_path / name for name in names], store)


def test_lookups_outside_are_refused(tmp_path):
    references = References.open([complete(tmp_path, 0, 8)], ArrayStore(8))
    for outside in (-1, 8, 10**12):
        with refused(f"block {outside} has no reference; there are those of"):
            references[[3, outside]]


def test_a_store_with_other_content_is_noticed_at_the_lookup(tmp_path):
    store = ArrayStore(8, changed={5})  # the digest claims that nothing changed
    references = References.open([complete(tmp_path, 0, 8)], store)
    references[[4, 6]]
    with refused(r"reference of block 5 is of other content .*\(1 of 2 looked"):
        references[[4, 5]]


@pytest.mark.parametrize("name", ["loss.npy", "hash.npy", "check.npy"])
def test_every_flipped_bit_is_noticed_at_the_lookup(tmp_path, name):
    references = References.open([complete(tmp_path, 0, 3)], ArrayStore(3))  # maps the files
    row = {"loss.npy": 12, "hash.npy": 8, "check.npy": 4}[name]
    with open(tmp_path / name, "r+b", buffering=0) as file:
        whole = file.read()
        for bit in range((len(whole) - 3 * row) * 8, len(whole) * 8):
            os.pwrite(file.fileno(), bytes([whole[bit // 8] ^ 1 << bit % 8]), bit // 8)
            block = (bit // 8 - (len(whole) - 3 * row)) // row
            references[[i for i in range(3) if i != block]]
            with refused(f"reference of block {block} is damaged"):
                references[[0, 1, 2]]
            if name != "check.npy":
                with refused("does not have the content its manifest.json names"):
                    references.verify()
            os.pwrite(file.fileno(), whole[bit // 8 :][:1], bit // 8)
    references.verify()


@pytest.mark.parametrize("name", ["loss.npy", "hash.npy", "check.npy"])
def test_files_that_were_cut_lost_or_swapped_do_not_open(tmp_path, name):
    complete(tmp_path, 0, 4)
    file = tmp_path / name
    whole = file.read_bytes()
    archive = b"PK\x05\x06" + bytes(18)  # which NumPy reads too
    flipped = whole[:20] + b"\0" + whole[21:]
    for content in (whole[:-1], whole[:40], b"", b"rubbish", archive, flipped, None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with refused(f"{name} cannot be read"):
            References.open([tmp_path], ArrayStore(4))
        file.write_bytes(whole)
    np.save(file, np.zeros((3, 3), np.float32))
    with refused(rf"{name} holds float32\[3, 3\], expected"):
        References.open([tmp_path], ArrayStore(4))


def test_manifests_on_disk(tmp_path):
    complete(tmp_path, 0, 4)
    file = tmp_path / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"stage": "score", "inputs": {}}))
    References.open([tmp_path], ArrayStore(4))  # others may add what is theirs
    file.write_text(json.dumps(content | {"schema": "rod-references-0"}))
    with refused("has schema 'rod-references-0', expected 'rod-references-2'"):
        References.open([tmp_path], ArrayStore(4))
    for text, sentence in (
        ("{", "is damaged (not valid JSON: "),
        ("[]", "holds no JSON object"),
        (json.dumps({k: v for k, v in content.items() if k != "model"}), "lacks the key 'model'"),
        (json.dumps(content | {"digest": 3}), "is damaged (AttributeError: "),
    ):
        file.write_text(text)
        with refused(rf"^{re.escape(f'{file} {sentence}')}"):
            References.open([tmp_path], ArrayStore(4))
    file.write_text(json.dumps(content | {"model": "other"}))
    with refused(r"does not have the content its manifest.json names"):
        References.open([tmp_path], ArrayStore(4)).verify()


def test_a_folder_holds_the_references_of_its_manifest_alone(tmp_path):
    mine, other = manifest(0, 4), manifest(0, 4, model="model-2")
    assert not holds(tmp_path / "none", mine, cure="leave it.")
    complete(tmp_path, 0, 4)
    assert holds(tmp_path, mine, cure="leave it.")
    sentence = r"holds references with model 'model-1' \(expected 'model-2'\): leave it\.$"
    with refused(sentence):
        holds(tmp_path, other, cure="leave it.")


def test_lookups_by_hash_without_a_store(tmp_path):
    folders = [complete(tmp_path / "a", 5, 9), complete(tmp_path / "b", 20, 40)]
    references = References.open(folders)
    ids = np.array([20, 5, 8, 39, 20])
    hashes = ArrayStore(40).hashes(ids)
    assert np.array_equal(references.find(hashes), ids)
    assert np.array_equal(references.losses(ids), losses_of(ids)[:, 0])
    hashes = np.concatenate([hashes, ArrayStore(99).hashes(np.array([2]))])
    with refused("1 of 6 blocks have no reference, the first is at position 5"):
        references.find(hashes)
    with pytest.raises(AssertionError, match="opened without a store"):
        references[[5]]


def test_the_index_of_hashes_takes_16_bytes_a_block() -> None:
    index = HashIndex(np.arange(2**16, dtype=np.uint64) << np.uint64(48))
    held = sum(getattr(value, "nbytes", 0) for value in vars(index).values())
    assert held <= 16 * 2**16 + 64


@given(
    heads=st.lists(
        st.integers(0, 2**64 - 1) | st.integers(2**63, 2**63 + 9), min_size=1, max_size=60
    ),
    others=st.lists(st.integers(0, 2**64 - 1) | st.integers(2**63 - 3, 2**63 + 9), max_size=20),
)
def test_the_hash_index_finds_the_first(heads, others):
    all_heads = heads + others
    places = HashIndex(np.array(heads, dtype=np.uint64)).find(np.array(all_heads, dtype=np.uint64))
    assert places.tolist() == [heads.index(head) if head in heads else -1 for head in all_heads]


def test_the_manifest_of_a_role_covers_its_blocks():
    store = ArrayStore(10)
    store.num_adaptation = 4
    for role, start, stop in (("adaptation", 0, 4), ("replay", 4, 10)):
        covered = role_manifest(store, role, model="m", lengths=[S], precision="fp32")
        assert (covered.start, covered.stop) == (start, stop)
    store.num_adaptation = 10
    for role in ("replay", "code"):
        with refused(f"no block of role '{role}'"):
            role_manifest(store, role, model="m", lengths=[S], precision="fp32")
