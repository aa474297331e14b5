"""The block store: ids, Megatron's view of the same files, and damage that is named."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpus_cases import S, make_corpus, run

from nemo_rod.corpus import BlockStore, block_hash
from nemo_rod.corpus.shards import HASH_HEADER_BYTES, hash_header, index_bytes
from nemo_rod.files import read_ahead

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    run(folder / "blocks", make_corpus(folder / "data"), blocks_per_shard=300)
    return folder / "blocks"


@pytest.fixture
def copy(root, tmp_path):
    return shutil.copytree(root, tmp_path / "blocks")


def test_ids_run_over_roles_and_names(root):
    store = BlockStore(root)
    assert [(s.role, s.name) for s in store.sources] == [
        ("adaptation", "new"), ("replay", "pages"), ("replay", "twice"), ("replay", "web"),
    ]  # fmt: skip
    ends = np.cumsum([s.count for s in store.sources])
    assert [s.start for s in store.sources] == [0, *ends[:-1]]
    assert len(store) == ends[-1] == store.num_adaptation + store.num_replay
    assert store.num_adaptation == store.sources[0].count
    ids = np.arange(len(store))
    expected = np.repeat(np.arange(4), [s.count for s in store.sources])
    assert store.source_index(ids).tolist() == expected.tolist()
    assert store.is_replay(ids).tolist() == (ids >= store.num_adaptation).tolist()
    assert (store.block_size, store.eod_id, store.vocab_size) == (S, 0, 256)


def test_blocks_and_hashes_are_looked_up_in_any_order(root):
    store = BlockStore(root)
    store.verify()
    everything, hashes = store.tokens(np.arange(len(store))), store.hashes(np.arange(len(store)))
    ids = np.random.default_rng(0).integers(0, len(store), 500)
    assert store.tokens(ids).tolist() == everything[ids].tolist()
    assert store.hashes(ids).tolist() == hashes[ids].tolist()
    new = np.load(root / "adaptation" / "new" / "hash.npy")
    assert new.tolist() == hashes[: store.num_adaptation].tolist()
    for i in (0, 299, 300, 301, len(store) - 1):
        name = store.sources[int(store.source_index([i])[0])].name
        assert hashes[i].tobytes() == block_hash(name, everything[i])
    assert store.tokens([3, 3]).dtype == np.int32 and store.tokens([]).shape == (0, S)


def test_reader_says_which_file_it_reads(root):
    reads: list[str] = []
    store = BlockStore(root, on_read=reads.append)
    reads.clear()
    store.checked_tokens([0, len(store) - 1, 1])
    names = [root / "adaptation/new/tokens-00000.bin", store.hash_files[-1].parent]
    assert reads[0] == f"reads blocks of {names[0]}" and reads[-1] == ""
    assert reads[1].startswith(f"reads blocks of {names[1]}/tokens-")
    reads.clear()
    size = sum(file.stat().st_size for file in store.hash_files)
    assert read_ahead(store.hash_files, reads.append) == size
    assert reads == [*(f"reads {file}" for file in store.hash_files), ""]


def test_a_pickled_store_opens_the_files_again(root):
    store = BlockStore(root, "holdout")
    data = pickle.dumps(store)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again.digest == store.digest
    assert again.tokens([1]).tolist() == store.tokens([1]).tolist()


@pytest.mark.parametrize("method", ["tokens", "hashes", "is_replay", "source_index"])
def test_ids_outside_are_named(root, method):
    store = BlockStore(root)
    for wrong in (-1, len(store)):
        with pytest.raises(IndexError, match=f"block id {wrong} is outside"):
            getattr(store, method)(np.array([0, wrong]))


def test_digests_tell_stores_apart(root, tmp_path):
    store, held = BlockStore(root), BlockStore(root, "holdout")
    moved = shutil.copytree(root, tmp_path / "moved")
    assert BlockStore(moved).digest == store.digest != held.digest
    corpus = make_corpus(tmp_path / "data")
    # How the blocks are dealt out to files does not matter, what they are does.
    assert run(tmp_path / "shards", corpus[::-1], blocks_per_shard=50).digest == store.digest
    assert run(tmp_path / "fewer", corpus[:2]).digest != store.digest


def test_files_are_what_megatron_writes(tmp_path):
    """Of any blocks; `verify` holds that a store's indices are `index_bytes`."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    blocks = np.arange(5 * S, dtype=np.int32).reshape(5, S)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    for block in blocks:
        builder.add_document(block, [S])
    builder.finalize(str(tmp_path / "x.idx"))
    assert (tmp_path / "x.idx").read_bytes() == index_bytes(5, S)
    assert (tmp_path / "x.bin").read_bytes() == blocks.astype("<i4").tobytes()


@pytest.mark.parametrize("count", [0, 1, 3_500_000, 10**12])
def test_the_hash_file_is_an_array_of_numpy(tmp_path, count):
    assert len(hash_header(count)) == HASH_HEADER_BYTES
    path = tmp_path / "hash.npy"
    path.write_bytes(hash_header(count))
    with path.open("rb") as handle:
        assert np.lib.format.read_magic(handle) == (1, 0)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(handle)
    assert (shape, fortran, dtype) == ((count, 16), False, np.dtype(np.uint8))


def flip(offset: int, bit: int = 4) -> Change:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= bit
        path.write_bytes(bytes(data))

    return change


def edit(key: str, value: object) -> Change:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def replace(content: bytes) -> Change:
    return lambda path: path.write_bytes(content)


def reverse_hashes(path: Path) -> None:
    """The hashes of another source with as many blocks: the sizes agree."""
    hashes = np.load(path)
    path.write_bytes(hash_header(len(hashes)) + hashes[::-1].tobytes())


WEB = "replay/web"
ON_OPENING: list[tuple[str, Change, str]] = [
    (f"{WEB}/tokens-00001.bin", Path.unlink, "web/tokens-00001.bin is missing"),
    (f"{WEB}/tokens-00001.bin", replace(b"x" * 100), r"1.bin has 100 bytes, expected \d+ bytes"),
    (f"{WEB}/tokens-00000.idx", replace(b""), r"0.idx has 0 bytes, expected \d+ bytes"),
    (f"{WEB}/hash.npy", replace(b"x" * 99), r"web/hash.npy has 99 bytes, expected \d+ bytes"),
    (f"{WEB}/hash.npy", flip(3), r"web/hash.npy does not hold \d+ block hashes"),
    (f"{WEB}/hash.npy", reverse_hashes, "web/tokens-00000.bin: block 0 does not match its hash"),
    (f"{WEB}/tokens-00000.bin", flip(8), "0.bin: block 0 does not match its hash in hash.npy"),
    (f"{WEB}/tokens-00002.bin", flip(-1), r"web/tokens-00002.bin: block \d+ does"),
    (f"{WEB}/manifest.json", Path.unlink, "web/manifest.json is missing"),
    (f"{WEB}/manifest.json", replace(b"{"), "web/manifest.json is damaged"),
    (f"{WEB}/manifest.json", edit("schema", 9), "has schema 9, this version"),
    (f"{WEB}/manifest.json", edit("eod_id", 9), "do not belong together: eod_id"),
    ("store.json", Path.unlink, "no complete block store"),
]
BY_VERIFY: list[tuple[str, Change, str]] = [
    (f"{WEB}/tokens-00001.bin", flip(4 * S * 17 + 5), "1.bin: block 17 does not match its hash in"),
    (f"{WEB}/hash.npy", flip(HASH_HEADER_BYTES + 16 * 5), "web/hash.npy does not match the digest"),
    (f"{WEB}/tokens-00001.idx", flip(50), "web/tokens-00001.idx was changed"),
    (f"{WEB}/manifest.json", edit("digest", "0" * 32), "web/hash.npy does not match the digest in"),
]


@pytest.mark.parametrize(
    ("file", "change", "message", "on_opening"),
    [*((*row, True) for row in ON_OPENING), *((*row, False) for row in BY_VERIFY)],
)
def test_damage_is_found(copy, file, change, message, on_opening):
    change(copy / file)
    store = None if on_opening else BlockStore(copy)
    with pytest.raises(ValueError, match=message) as error:
        _ = BlockStore(copy) if store is None else store.verify()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("place", [1, 3])  # in the last byte of a token, it makes it negative
def test_damage_is_found_where_it_is_read(root, copy, place):
    store = BlockStore(root)
    ids = np.random.default_rng(0).permutation(len(store))
    assert np.array_equal(store.checked_tokens(ids), store.tokens(ids))
    (source,) = (one for one in store.sources if one.name == "web")
    flip(4 * S * 7 + 4 + place, bit=128)(copy / WEB / "tokens-00000.bin")
    damaged = BlockStore(copy)
    beside = ids[ids != source.start + 7]
    assert np.array_equal(damaged.checked_tokens(beside), store.tokens(beside))
    message = r"web/tokens-00000.bin: block 7 does not match its hash in hash.npy"
    with pytest.raises(ValueError, match=message):
        damaged.checked_tokens(ids)
