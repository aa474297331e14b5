"""Reading: formats, filters, samples, caps, and the sentence when something is wrong."""

import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import read_documents, refuse, web, write_parquet

from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.documents import Documents
from nemo_rod.corpus.filters import lookup, parse_filter
from nemo_rod.corpus.formats import TextFile

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
RECORDS = [
    {"text": f"document {i} ü\n", "lang": ["de", "en"][i % 2], "meta": {"score": i / 10}}
    for i in range(20)
]
TEXTS = [str(record["text"]) for record in RECORDS]


def lines(records: Sequence[object]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same documents in every format."""
    folder, half = tmp_path_factory.mktemp("corpus"), len(RECORDS) // 2
    first, second = lines(RECORDS[:half]), lines(RECORDS[half:])
    pack = zstandard.ZstdCompressor().compress
    files = {
        "a.jsonl": first,
        "b.jsonl": second[:-1],  # the last line break may be missing
        "a.jsonl.gz": gzip.compress(first[:200]) + gzip.compress(first[200:]),
        "b.jsonl.gz": gzip.compress(second),
        "a.jsonl.zst": pack(first[:300]) + pack(first[300:]),
        "b.jsonl.zst": pack(second),
        "hub/train.jsonl": first + second,
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    write_parquet(folder / "all.parquet", RECORDS)
    return folder


def sources(root: Path, **fields: Any) -> Iterator[SourceSpec]:
    for suffix in ("", ".gz", ".zst"):
        yield web(root / f"*.jsonl{suffix}", **fields)
    yield web(root / "*.parquet", kind="parquet", **fields)
    pytest.importorskip("datasets")
    yield web(kind="huggingface", path=str(root / "hub"), **fields)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('lang == "de"', range(0, 20, 2)),
        ("lang != de and meta.score < 1", range(1, 10, 2)),
        ("meta.score >= 1.8", [18, 19]),
        ("meta.score<=0 and text != null", [0]),
        ("lang == 'x'", []),
    ],
)
def test_filters_pick_records(corpus, text, kept):
    for spec in sources(corpus, filter=text):
        assert list(read_documents(spec)) == [TEXTS[i] for i in kept], spec


def test_filter_values_are_json_or_bare_words():
    text = 'a == 1 and b == "x y and z" and c == true and d == é and e == "None"'
    assert [c.value for c in parse_filter(text)] == [1, "x y and z", True, "é", "None"]
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


@pytest.mark.parametrize(
    ("text", "value", "outcome"),
    [
        ("a == 0.5", Decimal("0.5"), True), ("a == 0.1", Decimal("0.1"), True),
        ("a != 0.1", Decimal("0.10"), False), ("a >= 0.2", Decimal("0.2"), True),
        ("a < 3", Decimal("2.99"), True), ("a == 0.7", float(np.float32(0.7)), True),
        ("a >= 0.7", float(np.float32(0.7)), True), ("a != 0.1", float(np.float32(0.1)), False),
        ("a > 0.1", float(np.float32(0.1)), False), ("a < 0.7", 0.5, True),
        ("a == 0.7", 0.70000001, False), ("a == 1", 1.0, True), ('a == "b\tc"', "b\tc", True),
        ("a == 'b\\d'", "b\\d", True), ("a != true", False, True), ("a == null", None, True),
        ("a == null", "null", False), ("a != null", 3, True), ("a != x", None, True),
        ("a == 3", None, False),
        ("a >= 2022-01-01", datetime(2022, 1, 1), True), ("a < 2022-01-01", date(2021, 9, 9), True),
        ('a == "2022-01-01"', date(2022, 1, 1), True), ("a != null", date(2022, 1, 1), True),
        ("a > 2022-01-01T01:00+01:00", datetime(2022, 1, 1, tzinfo=UTC), False),
        ("a >= 2022", date(2022, 1, 1), r"a date, datetime.date\(2022, 1, 1\)"),
        ("a >= soon", datetime(2022, 1, 1), r"a datetime, datetime.datetime\(2022, 1, 1, 0, 0\)"),
        # values of one type, and null has no order
        ("a < 3", None, "null, None: begin filter with a != null and"),
        ("a >= null", 3, "a number, 3"), ("a >= b", 0, "a number, 0: compare it with such a value"),
        *((f"a {operator} {literal}", value, kind)
          for operator in ("==", "!=", "<", ">=")
          for value, literal, kind in (
              (True, '"True"', "a boolean, True"), (True, "1", "a boolean, True"),
              (1, "true", "a number, 1"), ("2024", "2024", "a text, '2024'"),
              (2024, '"2024"', "a number, 2024"),
              (Decimal("0.5"), "half", r"a number, Decimal\('0.5'\)"),
              (["a"], "a", r"a list, \['a'\]"),
          )),
    ],
)  # fmt: skip
def test_a_comparison_holds_or_is_refused(text, value, outcome):
    comparison = parse_filter(text)[0]
    if isinstance(outcome, bool):
        assert comparison.holds(value) is outcome
        return
    sentence = f"compares a {comparison.operator} .*, but that field is {outcome}(: |$)"
    with pytest.raises(ValueError, match=sentence):
        comparison.holds(value)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        # half a surrogate pair
        (r'{"text": "a\ud83d b \ud83d\ude42"}', ["a\ufffd b 🙂"]),
        # line breaks inside of strings
        ('{"text": "a\u2028b\u0085c"}\n\n{"text": "d"}\n', ["a\u2028b\u0085c", "d"]),
    ],
)
def test_characters_that_json_has_in_strings(tmp_path, content, texts):
    (tmp_path / "a.jsonl").write_text(content, "utf-8")
    assert list(read_documents(web(tmp_path / "a.jsonl"))) == texts


@pytest.mark.parametrize(
    ("kind", "place", "fields", "parts"),
    [
        ("jsonl", "a.jsonl", {"text_field": "body"},
         ("a.jsonl:1: no field 'body'", "lang, meta, text")),
        ("jsonl", "a.jsonl", {"filter": "year > 3"}, ("a.jsonl:1: no field 'year'",)),
        ("parquet", "all.parquet", {"text_field": "body"},
         ("all.parquet: no field 'body'", "lang, meta, text")),
        ("parquet", "all.parquet", {"filter": "meta.x == 1"},
         ("all.parquet, row 1: no field 'meta.x'",)),
        ("huggingface", "hub", {"text_field": "body"}, ("hub, row 1: no field 'body'",)),
    ],
)  # fmt: skip
def test_a_missing_field_is_named_with_its_place(corpus, kind, place, fields, parts):
    if kind == "huggingface":
        pytest.importorskip("datasets")
        refuse(web(kind=kind, path=str(corpus / place), **fields), *parts)
    else:
        refuse(web(corpus / place, kind=kind, **fields), *parts)


def test_what_no_record_has_as_a_field_is_not_to_be_filtered_out(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "lang=de").mkdir()
    file = write_parquet(tmp_path / "lang=de" / "a.parquet", {"text": ["a"], "l": [[{"a": 1}]]})
    table, folder = web(file, kind="parquet"), web(kind="huggingface", path=str(tmp_path))
    for spec in (table, folder):
        is_list = "row 1: field 'l.a' is in a list, [{'a': 1}]: name another field"
        refuse(dataclasses.replace(spec, filter="l.a != null"), is_list)
        refuse(dataclasses.replace(spec, filter="lang == de"), "of those; the folder lang=... is")


@pytest.mark.parametrize(
    ("texts", "change", "options", "parts"),
    [
        # what is no Unicode; and what only the checksum of a page shows
        (["abcdefgh"], (b"abcdefgh", b"\xff" * 8), {}, ()),
        ([f"fox {i}" for i in range(100)], (b"fox 50", b"fow 50"),
         {"use_dictionary": False, "write_page_checksum": True}, ("CRC",)),
    ],
)  # fmt: skip
def test_damage_inside_of_parquet_names_its_file(tmp_path, texts, change, options, parts):
    file = write_parquet(tmp_path / "a.parquet", {"text": texts}, compression="none", **options)
    file.write_bytes(file.read_bytes().replace(*change))
    refuse(web(file, kind="parquet"), "a.parquet: not a readable parquet file", *parts)


def test_what_unpacks_to_more_than_memory_is_refused_on_the_way(tmp_path, monkeypatch):
    packed = zstandard.compress(b"a" * (256 << 20))
    assert len(packed) < 20_000
    for name in ("a.jsonl.zst", "a.txt.zst"):
        (tmp_path / name).write_bytes(packed)
    texts = web(tmp_path / "a.txt.zst", kind="text")
    pieces = [len(piece) for piece in TextFile(tmp_path / "a.txt.zst", "a", texts).chunks()]
    assert sum(pieces) == 256 << 20 and max(pieces) <= 128 << 20
    monkeypatch.setattr("nemo_rod.corpus.documents.MAX_DOCUMENT_BYTES", 1 << 20)
    (tmp_path / "a.text").write_bytes(b"abcd" * (1 << 19))
    refuse(web(tmp_path / "a.text", kind="text"), "a document of 2 MiB in a.text is larger than 1")
    for limit in ("MAX_DOCUMENT_BYTES", "MAX_LINE_BYTES"):
        monkeypatch.setattr(f"nemo_rod.corpus.formats.{limit}", 64 << 20)
    refuse(web(tmp_path / "a.jsonl.zst"), "zst: a line of more than 64 MiB: split")
    refuse(texts, "zst: a document of more than 64 MiB: split")


def test_rows_of_parquet_unpack_a_few_at_a_time(tmp_path, monkeypatch):
    text = pyarrow.array(["a" * (1 << 20)]).dictionary_encode().take(pyarrow.array([0] * 300))
    table = pyarrow.table({"text": text})  # which without its schema is read as plain texts
    file = write_parquet(tmp_path / "a.parquet", table, row_group_size=300, store_schema=False)
    pool = pyarrow.proxy_memory_pool(pyarrow.system_memory_pool())
    monkeypatch.setattr(pyarrow, "system_memory_pool", lambda: pool)
    lengths = [document.bytes for document in Documents(web(file, kind="parquet"))]
    assert lengths == [1 << 20] * 300
    assert 16 << 20 <= pool.max_memory() < 64 << 20  # of 300 MiB


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A dataset as the hub has them: configurations with splits, each of several files."""
    folder = tmp_path_factory.mktemp("hub")
    pytest.importorskip("datasets")
    card = ["---", "configs:"]
    for config, splits in {"web": ("wiki", "forum"), "legal": ("train",)}.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            card += [f"  - split: {split}", f"    path: {config}/{split}/*.parquet"]
            for part in range(5):
                write_parquet(
                    folder / config / split / f"{part}.parquet", {"text": rows(split, part)}
                )
    (folder / "README.md").write_text("\n".join([*card, "---", "A card"]))
    return folder


def rows(split: str, *parts: int) -> list[str]:
    return [f"{split} {part} {row}" for part in parts or range(5) for row in range(3)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"subset": "legal"}, rows("train")),
        ({"subset": "web", "split": "wiki"}, rows("wiki")),
        ({"subset": "legal", "max_files": 2}, rows("train", 0, 2)),
        ({"subset": "legal", "max_files": 9}, rows("train")),
        ({"subset": "web", "split": "forum", "max_files": 1}, rows("forum", 0)),
        ({"subset": "web", "split": "all"}, rows("forum") + rows("wiki")),
        (
            {"subset": "web", "split": "all", "max_files": 4},
            rows("forum", 0, 2) + rows("wiki", 0, 2),
        ),
    ],
)
def test_configurations_splits_and_files_of_a_hub_dataset(hub, fields, expected):
    spec = web(kind="huggingface", path=str(hub), **fields)
    assert list(read_documents(spec)) == expected
    documents = Documents(spec)
    reading = iter(documents)
    head = [next(reading).text for _ in range(4 if len(expected) > 4 else 2)]
    rest = [document.text for document in Documents(spec, documents.state())]
    assert head + rest == expected


def test_what_a_hub_dataset_lacks_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path, fields, parts in (
        (tmp_path / "none", {}, ["cannot be opened"]),
        (hub, {"subset": "web"}, ["Bad split: train", "check path"]),
        (hub, {"subset": "news"}, ["news", "check path, subset"]),
    ):
        refuse(web(kind="huggingface", path=str(path), **fields), *parts)


def test_max_files_spreads_over_the_sorted_paths(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number))
    for count, expected in ((3, "036"), (10, "0123456789"), (1, "0")):
        spec = web(tmp_path / "*.txt", kind="text", max_files=count)
        assert "".join(read_documents(spec)) == expected


@pytest.mark.parametrize("fields", [{}, {"text_field": "body", "filter": "text != null"}])
def test_two_columns_of_one_name_are_refused(tmp_path, fields):
    names = ["text", "body", "text", "id", "id"]
    table = pyarrow.Table.from_arrays([pyarrow.array([name]) for name in names], names=names)
    file = write_parquet(tmp_path / "a.parquet", table)
    sentence = "a.parquet: 2 columns are named 'text': remove or"
    refuse(web(file, kind="parquet", **fields), sentence)
    assert list(read_documents(web(file, kind="parquet", text_field="body"))) == ["body"]
