"""Sources of kind megatron: NVIDIA's own .bin and .idx, written with its own builder."""

import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, S, interrupted, manifest, run, tree, write
from places import Later

from nemo_rod.corpus import BlockStore, SourceSpec
from nemo_rod.corpus.documents import Documents, open_inputs

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron is not installed", allow_module_level=True)
indexed = Later("megatron.core.datasets.indexed_dataset")
EOD = BYTE.eod_id


def made(count: int, seed: int, eod: bool = True) -> list[list[int]]:
    random = np.random.default_rng(seed)
    ends = [EOD] * eod
    return [[*random.integers(1, 256, random.integers(1, 90)), *ends] for _ in range(count)]


def build(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any = np.int32) -> Path:
    """Documents of two or more tokens are written as two sequences each."""
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        cut = len(ids) // 2
        lengths = [cut, len(ids) - cut] if cut else [len(ids)]
        builder.add_document(np.array(ids), lengths)  # of a tensor, NumPy warns each time
    builder.finalize(f"{prefix}.idx")
    return prefix


def source(*files: Any, **fields: Any) -> SourceSpec:
    values = {"role": "replay", "kind": "megatron", "name": "web", **fields}
    return SourceSpec(files=[f if type(f) is float else str(f) for f in files], **values)


def packed(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Blocks by hand: the stream of the documents, each with one EOD at its end."""
    stream: list[int] = []
    for ids in documents:
        stream += [*ids] if ids[-1] == EOD else [*ids, EOD]
    whole = len(stream) // S * S
    return np.array(stream[:whole], np.int32).reshape(-1, S).tolist()


def stored(root: Path) -> list[list[int]]:
    return sorted(
        row
        for split in ("train", "holdout")
        for store in [BlockStore(root, split)]
        for row in store.tokens(np.arange(len(store))).tolist()
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("eod", [True, False])
def test_the_blocks_are_those_of_its_stream(tmp_path, dtype, eod):
    parts = [made(200, 1, eod), [[5, EOD, 7, EOD], *made(100, 2, eod), [9], [EOD]]]
    for name, documents in zip("ab", parts, strict=True):
        build(tmp_path / name, documents, dtype)
    run(tmp_path / "store", [source(tmp_path / "?")])
    documents = [ids for part in parts for ids in part if ids != [EOD]]
    assert stored(tmp_path / "store") == sorted(packed(documents))


def test_texts_and_their_ids_make_the_same_store(tmp_path):
    texts = [f"document {i}, once {'more ' * (i % 9)}" for i in range(300)]
    texts += texts[:50]
    build(tmp_path / "a", [[*text.encode(), EOD] for text in texts])
    write(tmp_path / "a.jsonl", texts)
    for name, spec in {
        "ids": source(tmp_path / "a", dedup=True, max_tokens=5000),
        "text": source(tmp_path / "a.jsonl", kind="jsonl", dedup=True, max_tokens=5000),
    }.items():
        run(tmp_path / name, [spec])
    assert stored(tmp_path / "ids") == stored(tmp_path / "text")


READ = """
import sys
from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.documents import Documents
spec = SourceSpec(name="x", role="replay", kind="megatron", files=[sys.argv[1]])
documents = iter(Documents(spec))
next(documents)
assert "a.bin" not in open("/proc/self/maps").read(), "it is mapped, and counts as memory"
assert len([*documents]) == 199 and not {"torch", "megatron"} & {*sys.modules}
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    build(tmp_path / "a", made(200, 1))
    subprocess.run([sys.executable, "-c", READ, str(tmp_path / "a")], check=True)


def test_weights_give_the_blend_of_tokens_and_read_nothing_twice(tmp_path):
    for number, name in enumerate("ab"):
        build(tmp_path / name, made(4000, number))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run(tmp_path / "store", [source(0.3, a, 0.7, b)])
    files = manifest(tmp_path / "store")["files"]
    assert files[0]["share"] == pytest.approx(3 / 7, rel=0.02) and "share" not in files[1]
    assert files[1]["documents"] == 4000
    assert files[0]["documents"] / 4000 == pytest.approx(files[0]["share"], abs=0.03)
    with pytest.raises(ValueError, match=r"made otherwise: .*share"):
        run(tmp_path / "store", [source(0.4, a, 0.6, b)])


def test_a_file_has_one_weight_whatever_leads_to_it(tmp_path):
    for name in "ab":
        build(tmp_path / name, made(40, 1))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"a{suffix}")
        os.link(tmp_path / f"a{suffix}", tmp_path / f"hard{suffix}")
    (tmp_path / "latest").symlink_to(".")
    for other in ("a", "a.bin", "link", "hard", "latest/a", "[a]"):
        assert len([*Documents(source(tmp_path / "a", tmp_path / other))]) == 40
        with pytest.raises(ValueError, match="has two weights in files: give it one"):
            open_inputs(source(0.5, tmp_path / "a", 0.5, tmp_path / other))


@pytest.mark.parametrize("fields", [{"subsample": 0.7}, {"options": {"copy": False}}])
def test_an_interrupted_run_ends_in_the_same_files(tmp_path, fields, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 2000)
    build(tmp_path / "a", made(400, 3))
    spec = source(tmp_path / "a", **fields)
    run(tmp_path / "whole", [spec])
    interrupted(tmp_path / "broken", [spec], 4, 6, 3, 10, 2, 5)
    run(tmp_path / "broken", [spec])
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")


def cut(suffix: str, number: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = prefix.with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:number])

    return damage


def index(place: int, kind: str, value: int) -> Callable[[Path], None]:
    """Overwrites a number of the index."""

    def damage(prefix: Path) -> None:
        data = bytearray(prefix.with_suffix(".idx").read_bytes())
        struct.pack_into(kind, data, place % len(data), value)
        prefix.with_suffix(".idx").write_bytes(data)

    return damage


def index_of(order: list[int]) -> Callable[[Path], None]:
    """Writes an index of some documents, of two sequences of two ids each, in some order."""

    def damage(prefix: Path) -> None:
        sequences = [2 * number + half for number in order for half in (0, 1)]
        parts = [
            np.full(len(sequences), 2, "<i4"), np.array(sequences, "<i8") * 8,
            np.arange(0, len(sequences) + 1, 2, "<i8"),
        ]  # fmt: skip
        head = prefix.with_suffix(".idx").read_bytes()[:18]
        head += struct.pack("<QQ", len(sequences), len(order) + 1)
        prefix.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))

    return damage


DAMAGED = r"a\.bin has an index that is damaged at document [01]: fetch it again"
NINE = [[5, 6, 7, EOD]] * 9  # of two sequences each


@pytest.mark.parametrize(
    ("damage", "documents", "sentence"),
    [
        (lambda p: p.with_suffix(".idx").unlink(), [[5, EOD]], r"a\.bin has no index: .*a\.idx is"),
        (lambda p: p.with_suffix(".bin").unlink(), [[5, EOD]], r"no file matches '.*a\.bin'"),
        (cut(".idx", 20), [[5, EOD]], r"a\.idx is no index of Megatron"),
        (cut(".idx", 60), [[5, EOD]], r"a\.idx has 60 bytes, and its counts ask for"),
        (cut(".bin", 40), [[5, 6, 7, EOD]] * 9, r"a\.bin has 40 bytes, and its index ends at 144"),
        (cut(".bin", 0), [[5, EOD]], r"a\.bin is empty"),
        (index(17, "B", 7), [[5, EOD]], r"a\.idx describes values of type 7: expected whole"),
        (index(17, "B", 5), [[5, EOD]], r"a\.bin has 8 bytes, and its index ends at 12"),
        (index(9, "<Q", 2), NINE, r"a\.idx is no index of Megatron"),
        (index(34 + 4 * 18 + 16, "<q", 100), NINE, DAMAGED),
        (index(34, "<i", -2), NINE, DAMAGED),
        (index(34 + 12 * 18 + 8, "<q", -1), NINE, DAMAGED),
        (index(34 + 12 * 18 + 8, "<q", 99), NINE, DAMAGED),
        (index(-16, "<q", 99), NINE, r"a\.bin has an index that is damaged at document 7: fetch"),
        (index(34 + 12 * 18, "<q", 1), NINE, "is whole, .* of its sequences 1 to 18 of 18: give"),
        (index(-8, "<q", 17), NINE, "is whole, .* documents of its sequences 0 to 17 of 18: give"),
        (index_of([*range(9)][::-1]), NINE, "is whole, .* lists sequences in another order: give"),
        (index_of([1, 0, *range(2, 9)]), NINE, "is whole, .* lists sequences in another order"),
        (index_of([*range(5)]), NINE, "is whole, but its index lists bytes 0 to 80 of its 144"),
        (index_of([*range(4, 9)]), NINE, "is whole, but its index lists bytes 64 to 144 of its"),
        (index_of([0, 0]), NINE, "has 144 bytes, and its index ends at 16: it was cut off, or be"),
        (None, [*made(50, 1), [5, 999, EOD]],
         r"a\.bin, document 50: id 999 is outside the vocabulary, which has 256: name"),
        (None, [[5, 6, 11], [7, 11], [8, 11]],
         r"end with token 11, and those of the tokenizer with 0: set domain\.eod=11"),
        (None, [[*range(i, i + S)] for i in range(1, 9)], r"its documents have 32 tokens each"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(tmp_path, damage, documents, sentence):
    build(tmp_path / "a", documents)
    if damage:
        damage(tmp_path / "a")
    with pytest.raises(ValueError, match=sentence) as error:
        run(tmp_path / "store", [source(tmp_path / "a")])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store" / "store.json").exists()


def in_place(*files: Any, **fields: Any) -> SourceSpec:
    return source(*files, options={"copy": False}, **fields)


@pytest.fixture
def both(tmp_path):
    """A store with copied blocks, and one whose blocks stay in three files of two types."""
    for number, (name, kind) in enumerate(zip("abc", (np.int32, np.uint16, np.int32), strict=True)):
        build(tmp_path / name, [*made(150, number), [], [7, EOD, EOD]], kind)
    write(tmp_path / "new.jsonl", [f"something new {number}" * 9 for number in range(40)])
    new = source(tmp_path / "new.jsonl", kind="jsonl", name="new", role="adaptation")
    options = {"holdout_floor": 70, "replay_ratio": 2.0, "blocks_per_shard": 100}
    run(tmp_path / "copied", [new, source(tmp_path / "[abc]")], **options)
    run(tmp_path / "there", [new, in_place(tmp_path / "[abc]")], **options)
    return tmp_path / "copied", tmp_path / "there"


def test_blocks_that_stay_in_their_files_are_those_that_are_copied(both):
    for split in ("train", "holdout"):
        copied, there = (BlockStore(root, split) for root in both)
        ids = np.random.default_rng(0).permutation(len(copied))
        assert np.array_equal(copied.checked_tokens(ids), there.checked_tokens(ids))
        assert there.digest == copied.digest and there.sources == copied.sources
        there.verify()
    folder = both[1] / "replay" / "web"
    manifests = [manifest(root) for root in both]
    assert "thinned" in manifests[0] and "raised" in manifests[0] and len(copied) > 60
    assert manifests[0].keys() ^ manifests[1].keys() == {"in_place"}
    assert not [*folder.rglob("*.bin"), *folder.rglob("*.idx")] and [*folder.rglob("*.rows")]
    for path in (*folder.rglob("hash.npy"), *(both[1] / "adaptation").rglob("*.*")):
        assert path.read_bytes() == (both[0] / path.relative_to(both[1])).read_bytes()


def test_of_many_files_few_stay_open(tmp_path):
    for number in range(300):
        build(tmp_path / f"{number:03}", made(3, number))
    copied = run(tmp_path / "copied", [source(tmp_path / "*")])
    stores = [run(tmp_path / "there", [in_place(tmp_path / "*")]) for _ in range(2)]
    before = len(os.listdir("/proc/self/fd"))
    ids = np.random.default_rng(0).permutation(len(copied))
    for store in stores:
        assert np.array_equal(store.checked_tokens(ids), copied.tokens(ids))
    assert len(os.listdir("/proc/self/fd")) - before < 257


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8 * S)


def write_later(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (0, path.stat().st_mtime + 2))


@pytest.mark.parametrize(
    ("change", "state"),
    [(move, "is missing"), (shorten, "was changed"), (write_later, "was changed")],
)
def test_a_file_that_is_no_longer_as_it_was_is_named_on_opening(tmp_path, change, state):
    file = build(tmp_path / "a", made(90, 1)).with_suffix(".bin")
    run(tmp_path / "store", [in_place(tmp_path / "a")])
    store = BlockStore(tmp_path / "store")
    change(file)
    with pytest.raises(ValueError, match=rf"a\.bin, .* blocks in .*/web are read, {state}.*: put"):
        BlockStore(tmp_path / "store")
    if change is move:  # it is named where it is now
        for path in (tmp_path / "store").rglob("manifest.json"):
            path.write_text(path.read_text().replace('a.bin"', 'elsewhere"'))
        BlockStore(tmp_path / "store").verify()
    else:  # one that was open then never returns other tokens
        with pytest.raises(
            ValueError,
            match=r"was changed while|cut off while|a\.bin, from byte \d+ on: block \d+ do",
        ):
            store.checked_tokens(np.arange(len(store)))


def test_a_file_that_changes_before_the_store_is_done_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 2000)
    file = build(tmp_path / "a", made(400, 3)).with_suffix(".bin")
    spec, store = in_place(tmp_path / "a"), tmp_path / "store"
    interrupted(store, [spec], 5)
    os.utime(file, (0, 0))
    with pytest.raises(ValueError, match=r"a\.bin, .* was changed after they were made"):
        run(store, [spec])
    run(store, [spec]).verify()  # from its beginning


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        ([[5, 6], [5, 6, 7]], r"a\.bin: some of its documents do not end with EOD"),
        ([[5, EOD], [6]], r"a\.bin: some of its documents do not end with EOD"),
        ([[5, EOD], [EOD]], r"a\.bin: some of its documents do not end with EOD"),
        ([*[[5, EOD]] * 1100, [6], *[[5, EOD]] * 1100],
         r"source web: \S*a\.bin, from byte \d+ on has other tokens than its documents with one "
         r"EOD after each: leave out options\.copy"),
    ],
)  # fmt: skip
def test_documents_that_cannot_stay_in_their_file_are_refused(tmp_path, documents, sentence):
    build(tmp_path / "a", documents)
    with pytest.raises(ValueError, match=sentence) as error:
        run(tmp_path / "store", [in_place(tmp_path / "a")])
    assert "\n" not in str(error.value) and not (tmp_path / "store/replay").exists()
