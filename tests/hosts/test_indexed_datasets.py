"""Sources of kind megatron: NVIDIA's own .bin and .idx, written with its own builder."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, S, run, tree, write

from nemo_rod.corpus import BlockStore, SourceSpec
from nemo_rod.corpus.documents import Documents, open_inputs
from nemo_rod.lab.rehearsal.made_documents import small_source, write_sources

indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
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
def test_the_blocks_are_those_of_its_stream(tmp_path: Path, dtype: Any, eod: bool) -> None:
    parts = [made(200, 1, eod), [[5, EOD, 7, EOD], *made(100, 2, eod), [9], [EOD]]]
    for name, documents in zip("ab", parts, strict=True):
        build(tmp_path / name, documents, dtype)
    run(tmp_path / "store", [source(tmp_path / "?")])
    documents = [ids for part in parts for ids in part if ids != [EOD]]
    assert stored(tmp_path / "store") == sorted(packed(documents))


def test_texts_and_their_ids_make_the_same_store(tmp_path: Path) -> None:
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


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    build(tmp_path / "a", made(200, 1))
    subprocess.run([sys.executable, "-c", READ, str(tmp_path / "a")], check=True)


def test_weights_give_the_blend_of_tokens_and_read_nothing_twice(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        build(tmp_path / name, made(4000, number))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run(tmp_path / "store", [source(0.3, a, 0.7, b)])
    files = json.loads((tmp_path / "store/replay/web/manifest.json").read_text())["files"]
    assert files[0]["share"] == pytest.approx(3 / 7, rel=0.02) and "share" not in files[1]
    assert files[1]["documents"] == 4000
    assert files[0]["documents"] / 4000 == pytest.approx(files[0]["share"], abs=0.03)
    with pytest.raises(ValueError, match=r"made otherwise: .*share"):
        run(tmp_path / "store", [source(0.4, a, 0.6, b)])


def test_a_file_has_one_weight_whatever_leads_to_it(tmp_path: Path) -> None:
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


def test_an_interrupted_run_ends_in_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 2000)
    build(tmp_path / "a", made(400, 3))
    spec = source(tmp_path / "a", subsample=0.7)
    run(tmp_path / "whole", [spec])
    stops = 0
    for _ in range(60):
        calls = iter([None] * 3)  # of a run that is interrupted

        def stop(*_: object, calls: Iterator[None] = calls) -> None:
            if next(calls, "over"):
                raise KeyboardInterrupt

        try:
            run(tmp_path / "broken", [spec], progress=stop, checkpoint_seconds=0.0)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 4
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


DAMAGED = r"a\.bin: its index is damaged at document [01]: fetch it again"
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
        (index(-16, "<q", 99), NINE, r"a\.bin: its index is damaged at document 7: fetch it again"),
        (index(34 + 12 * 18, "<q", 1), NINE, r"a\.bin has 144 bytes, and its index ends at 144"),
        (index(-8, "<q", 17), NINE, r"a\.bin has 144 bytes, and its index ends at 144"),
        (None, [*made(50, 1), [5, 999, EOD]],
         r"a\.bin, document 50: id 999 is outside the vocabulary, which has 256: name"),
        (None, [[5, 6, 11], [7, 11], [8, 11]],
         r"end with token 11, and those of the tokenizer with 0: set domain\.eod=11"),
        (None, [[*range(i, i + S)] for i in range(1, 9)], r"its documents have 32 tokens each"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    tmp_path: Path, damage: Any, documents: list[list[int]], sentence: str
) -> None:
    build(tmp_path / "a", documents)
    if damage:
        damage(tmp_path / "a")
    with pytest.raises(ValueError, match=sentence) as error:
        run(tmp_path / "store", [source(tmp_path / "a")])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store" / "store.json").exists()


@pytest.mark.parametrize(
    ("files", "fields", "sentence"),
    [
        ([0.3, "a", 0.7], {}, "expected prefixes, or a weight before each prefix"),
        ([0.3, "a", "b", "c"], {}, "expected prefixes, or a weight before each prefix"),
        ([0.3, "a", -1.0, "b"], {}, "gives b the weight -1.0: expected a positive number"),
        ([0.3, "a", 0.7, "b"], {"max_tokens": 9}, "max_tokens=9 would cut the blend"),
        (["a"], {"filter": "x == 1"}, "kind=megatron reads files instead; remove filter"),
        (["a"], {"max_bytes": 9}, "kind=megatron reads files instead; remove max_bytes"),
        (["a"], {"text_field": "b"}, "kind=megatron reads files instead; remove text_field"),
        (["s3://a/b"], {}, "reads local files"),
    ],
)
def test_what_a_blend_cannot_be_is_refused(
    files: list[Any], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_inputs(source(*files, **fields))


def test_a_rehearsal_makes_lines_in_their_place(tmp_path: Path) -> None:
    spec = source(0.3, "a", 0.7, "b")
    changed = small_source(spec, tmp_path, block_size=S)
    write_sources([spec], tmp_path)
    small = dataclasses.replace(spec, **changed)
    assert small.kind == "jsonl" and len([*Documents(small)]) > 10
