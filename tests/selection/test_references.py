"""Reference losses: parts under crashes, only the required blocks, lookups that notice damage."""

import hashlib
import json
import os
import re
import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from mishaps import largest_file

from nemo_rod.selection.references import ReferenceManifest, References, ReferenceWriter
from nemo_rod.selection.references import folder as folders
from nemo_rod.selection.references.folder import Folder, holds, role_manifest

S = 64
LENGTHS = (64, 32, 16)
OTHERS = ({"model": "x"}, {"tokenizer": "x"}, {"store": "x"}, {"lengths": (64, 8)}, {"stop": 9})


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
        "block_size": S, "lengths": LENGTHS, "start": start, "stop": stop, "precision": "fp32",
    }  # fmt: skip
    return ReferenceManifest(**(default | values))


def losses_of(block_ids):
    """Losses that only these blocks have, float32 [C, 3]."""
    ids = np.asarray(block_ids, dtype=np.float64)[:, None]
    return (10 + np.sin(ids * 8 + np.arange(3))).astype(np.float32)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(folders, "_SMALLEST", 4)  # blocks


def writer_of(folder, m, required=None):
    return ReferenceWriter(folder, m, ArrayStore(m.stop).hashes, required)


def write(folder, m, most=None, required=None):
    """Scores the missing blocks, three at a time, or the first `most` of them."""
    writer = writer_of(folder, m, required)
    left = len(writer.missing) if most is None else most
    while left > 0 and len(writer.missing):
        ids = writer.missing[: min(left, 3)]
        writer.append(ids, losses_of(ids))
        left -= len(ids)
    if not len(writer.missing):
        writer.close()


def complete(folder, start, stop, **values):
    write(folder, manifest(start, stop, **values))
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- writing


def test_everything_is_found(tmp_path):
    complete(tmp_path / "specialist", 0, 20)
    complete(tmp_path / "base", 20, 50, model="model-2")
    paths, store = [tmp_path / "base", tmp_path / "specialist"], ArrayStore(50)
    references = References.open(paths, store)
    ids = np.random.default_rng(0).integers(0, 50, 200)
    assert [m.model for m in references.manifests] == ["model-1", "model-2"]
    assert references[ids].dtype == np.float32
    assert np.array_equal(references[[]], np.empty(0, np.float32))
    for column, length in enumerate(LENGTHS):
        beginning = References.open(paths[::-1], store, length=length)
        assert beginning.length == length and beginning.digest == references.digest
        assert np.array_equal(beginning[ids], losses_of(ids)[:, column])
    with refused(r"of the first 64, 32, 16 tokens of a block, but candidates are scored by 8: "):
        References.open(paths, store, length=8)
    references.refuse_missing(np.ones(50, dtype=bool))


def test_parts_are_a_hundredth_of_a_folder(monkeypatch):
    monkeypatch.undo()
    for count, size, parts in ((1, 256, 1), (257, 256, 2), (25_601, 257, 100), (10**9, 10**7, 100)):
        m = manifest(5, 5 + count)
        assert (m.part_size, m.num_parts) == (size, parts)
        last = m.size(parts - 1)
        assert (parts - 1) * size + last == count


class Filling(stateful.RuleBasedStateMachine):
    """A folder that is written, cut short at any byte, and filled in with other blocks."""

    path, m = Path(), manifest(0, 40)  # of ten parts

    @stateful.initialize()
    def begin(self):
        shutil.rmtree(self.path, ignore_errors=True)
        self.there, self.manifest = np.zeros(40, dtype=bool), self.path / "manifest.json"

    @stateful.rule(
        parts=st.integers(0, 2**10 - 1), shift=st.integers(0, 3),
        most=st.none() | st.integers(0, 20), room=st.none() | st.integers(1, 600),
    )  # fmt: skip
    def score(self, parts, shift, most, room):
        """Blocks of some parts, or the first `most` of them, in files of at most `room` bytes."""
        required = np.roll(np.repeat([parts >> n & 1 for n in range(10)], 4).astype(bool), shift)
        before, complete = self.there, holds(self.path, self.m, required)
        was_done = self.manifest.exists()
        with suppress(OSError) if room else nullcontext(), largest_file(room or 1 << 20):
            write(self.path, self.m, most, required)
        if room and not any(self.path.glob("*.json")):
            return
        self.there = Folder.open(self.path, unfinished=True).present()
        new = self.there & ~before
        lost = min(40 if most is None else most, (required & ~before).sum()) - new.sum()
        assert lost < 4 or room  # what was scored of a part that is not whole
        assert (before <= self.there).all() and (new <= required).all()
        assert all(
            (self.there >= required)[n : n + 4].all() for n in 4 * (np.flatnonzero(new) // 4)
        )
        missing = writer_of(self.path, self.m, required).missing
        assert missing.tolist() == np.flatnonzero(required & ~self.there).tolist()
        held = holds(self.path, self.m, required)
        assert held >= complete and (held or most is not None or room)
        assert self.manifest.exists() == (was_done or held)

    @stateful.precondition(lambda self: self.manifest.exists())
    @stateful.rule()
    def read(self):
        references, ids = References.open([self.path], ArrayStore(40)), np.arange(40)
        scored, lost = ids[self.there], ids[~self.there]
        assert np.array_equal(references[scored], losses_of(scored)[:, 0])
        sentence = ""
        if len(lost):
            sentence = rf"block {lost[0]} has no reference \({len(lost)} of those looked up\); "
            sentence += rf"references found: {len(scored)} blocks in \[0, 40\)"
        for use in (references.__getitem__, lambda _: references.refuse_missing(~self.there)):
            with refused(sentence) if sentence else nullcontext():
                use(ids)

    @stateful.precondition(lambda self: any(self.path.glob("*.json")))
    @stateful.rule(other=st.sampled_from(OTHERS))
    def ask_for_something_else(self, other):
        before, ((name, value),) = files(self.path), other.items()
        for use in (partial(writer_of, self.path), partial(holds, self.path)):
            with refused(
                rf"holds references with {name} .* \(expected {re.escape(repr(value))}\): "
            ):
                use(replace(self.m, **other))
        assert files(self.path) == before
        assert holds(self.path, replace(self.m, lengths=(64, 16))) == holds(self.path, self.m)

    def teardown(self):
        write(self.path, self.m)
        assert files(self.path) == files(self.path.with_name("whole"))


def test_whatever_is_scored_first_it_ends_in_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody takes the power off
    write(tmp_path / "whole", Filling.m)
    names = ["manifest.json", *(f"part-0000{n}.npy" for n in range(10))]
    assert sorted(files(tmp_path / "whole")) == names
    machine = type("Machine", (Filling,), {"path": tmp_path / "filled"})
    stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=12)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_are_refused(tmp_path, bad):
    writer, losses = writer_of(tmp_path, manifest(0, 4)), losses_of(range(4))
    losses[2, 1] = bad
    with refused(r"scoring pass has losses that are not finite for 1 blocks, .* block 2: "):
        writer.append(range(4), losses)
    assert sorted(files(tmp_path)) == ["unfinished.json"]


def test_manifests_that_make_no_sense():
    for lengths in ((), (65,), (0,), (32, 64), (64, 64), (64, "32")):
        with refused(r"lengths is .*, expected"):
            manifest(0, 4, lengths=lengths)
    with refused(r"block ids \[4, 4\) hold no block"):
        manifest(4, 4)


# --- reading


def test_folders_must_fit_each_other_and_the_store(tmp_path):
    for name, start, stop, values in (
        ("a", 0, 8, {}),
        ("b", 7, 12, {}),
        ("c", 9, 12, {}),
        ("d", 8, 12, {"tokenizer": "tokenizer-2"}),
    ):
        complete(tmp_path / name, start, stop, **values)
    for names, store, sentence in (
        (
            "a",
            ArrayStore(8, digest="s2"),
            "manifest.json is of block store 'store-1', expected 's2'",
        ),
        (
            "a",
            ArrayStore(8, tokenizer_fingerprint="t2"),
            "is of tokenizer 'tokenizer-1', expected 't2'",
        ),
        ("a", ArrayStore(8, block_size=128), "is of block size 64, expected 128: score again"),
        ("ad", None, "is of tokenizer 'tokenizer-2', expected 'tokenizer-1'"),
        ("ba", ArrayStore(12), "both have references of block 7: name one"),
        ("ac", ArrayStore(12), "block 8 of 12 has no reference; references found:"),
        ("a", ArrayStore(12), "block 8 of 12 has no reference"),
        ("c", ArrayStore(12), "block 0 of 12 has no reference"),
        ("", ArrayStore(12), "no folder of references was given"),
        ("x", ArrayStore(12), r"x/manifest.json does not exist: write the references to the end"),
    ):
        with refused(sentence):
            References.open([tmp_path / name for name in names], store)


def test_lookups_outside_are_refused(tmp_path):
    references = References.open([complete(tmp_path, 0, 8)], ArrayStore(8))
    for outside in (-1, 8, 10**12):
        with refused(
            rf"block {outside} has no reference \(1 of those looked up\); references found"
        ):
            references[[3, outside]]


def test_a_store_with_other_content_is_noticed_at_the_lookup(tmp_path):
    store = ArrayStore(8, changed={5})  # the digest claims that nothing changed
    references = References.open([complete(tmp_path, 0, 8)], store)
    references[[4, 6]]
    with refused(r"block 5's hash does not match .*\(1 of 2 looked"):
        references[[4, 5]]


def test_every_flipped_bit_is_noticed(tmp_path):
    complete(tmp_path, 0, 7)
    file = tmp_path / "part-00001.npy"
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 11):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with refused("part-00001.npy cannot be read"):
            References.open([tmp_path], ArrayStore(7))
    reads = []
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    later = References.open([tmp_path], ArrayStore(7), verified=False)
    with refused("part-00001.npy cannot be read"):
        later.verify(reads.append)
    assert reads == [f"reads {tmp_path}/part-0000{number}.npy" for number in (0, 1)]
    file.write_bytes(whole)
    later.verify(reads.append)
    References.open([tmp_path], ArrayStore(7))


def test_files_that_were_cut_lost_or_swapped_are_refused(tmp_path):
    complete(tmp_path, 0, 7)
    file = tmp_path / "part-00000.npy"
    whole = file.read_bytes()
    archive = b"PK\x05\x06" + bytes(18)  # which NumPy reads too
    for content in (whole[:-1], whole[:40], b"", b"rubbish", archive, whole + b"x"):
        file.write_bytes(content)
        with refused(f"{file.name} cannot be read"):
            References.open([tmp_path], ArrayStore(7))
    file.write_bytes((tmp_path / "part-00001.npy").read_bytes())
    with refused(rf"{file.name} holds .*\[3\], expected .*\[4\]"):
        References.open([tmp_path], ArrayStore(7))
    file.unlink()
    with refused("block 1 has no reference"):
        References.open([tmp_path], ArrayStore(7))[[5, 1]]


def test_manifests_on_disk(tmp_path):
    complete(tmp_path, 0, 4)
    file = tmp_path / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"stage": "score", "inputs": {}}))
    References.open([tmp_path], ArrayStore(4))  # others may add what is theirs
    for text, sentence in (
        (json.dumps(content | {"schema": "rod-references-1"}), "has schema 'rod-references-1', e"),
        (json.dumps({k: v for k, v in content.items() if k != "model"}), "lacks the key 'model'"),
        (json.dumps(content | {"precision": 3}), "is damaged (TypeError: "),
        (json.dumps(content | {"lengths": ["x"]}), "is damaged (lengths is ('x',), "),
    ):
        file.write_text(text)
        with refused(rf"^{re.escape(f'{file} {sentence}')}"):
            References.open([tmp_path], ArrayStore(4))


def test_lookups_without_a_store(tmp_path):
    references = References.open([complete(tmp_path / "a", 5, 9), complete(tmp_path / "b", 20, 40)])
    ids = np.array([20, 5, 8, 39, 20])
    assert np.array_equal(references.losses(ids), losses_of(ids)[:, 0])
    with pytest.raises(ValueError, match="opened without a block store"):
        references[[5]]
    for one in (tmp_path / "a", str(tmp_path / "a")):  # not in a list
        assert References.open(one).digest == References.open([one]).digest


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
