"""Reading: formats, filters, samples, caps, and the sentence when something is wrong."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import read_documents
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.documents import Documents, find_duplicates
from nemo_rod.corpus.filters import lookup, parse_filter
from nemo_rod.corpus.formats import TextFile

zstandard = pytest.importorskip("zstandard")
pytest.importorskip("pyarrow")
RECORDS = [
    {"text": f"document {i} ü\n", "lang": ["de", "en"][i % 2], "meta": {"score": i / 10}}
    for i in range(20)
]
TEXTS = [str(record["text"]) for record in RECORDS]


def spec(kind: str, files: Sequence[str | Path] = (), **fields: Any) -> SourceSpec:
    return SourceSpec(
        name="web", role="replay", kind=kind, files=[str(file) for file in files], **fields
    )


def lines(records: Sequence[object]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def tar(name: str, data: bytes) -> bytes:
    file, member = io.BytesIO(), tarfile.TarInfo(name)
    member.size = len(data)
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_parquet(path: Path, records: Sequence[dict[str, Any]], rows: int = 7) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=rows)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents in every format."""
    tmp_path, half = tmp_path_factory.mktemp("corpus"), len(RECORDS) // 2
    first, second = lines(RECORDS[:half]), lines(RECORDS[half:])
    (tmp_path / "a.jsonl").write_bytes(first)
    (tmp_path / "b.jsonl").write_bytes(second[:-1])  # the last line break may be missing
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(first[:200]) + gzip.compress(first[200:]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(second))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(first[:300]) + pack(first[300:]))
    (tmp_path / "b.jsonl.zst").write_bytes(pack(second))
    write_parquet(tmp_path / "all.parquet", RECORDS)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        data = text.encode()
        if number % 2:
            (tmp_path / "texts" / f"{number:02d}.txt.gz").write_bytes(gzip.compress(data))
        else:
            (tmp_path / "texts" / f"{number:02d}.txt").write_bytes(data)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(lines(RECORDS))
    return tmp_path


def sources(root: Path, **fields: Any) -> Iterator[SourceSpec]:
    for suffix in ("", ".gz", ".zst"):
        yield spec("jsonl", [root / f"*.jsonl{suffix}"], **fields)
    yield spec("parquet", [root / "*.parquet"], **fields)
    pytest.importorskip("datasets")
    yield spec("huggingface", path=str(root / "hub"), **fields)


def test_every_format_gives_the_documents_in_order(corpus: Path) -> None:
    for source in sources(corpus):
        assert list(read_documents(source)) == TEXTS, source
    assert list(read_documents(spec("text", [corpus / "texts" / "**"]))) == TEXTS


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
def test_filters_pick_records(corpus: Path, text: str, kept: Sequence[int]) -> None:
    for source in sources(corpus, filter=text):
        assert list(read_documents(source)) == [TEXTS[i] for i in kept], source


@pytest.mark.parametrize(
    "text", ["lang", "lang = de", "== de", "a == 1 and", "a == 1 or b == 2", 'a == "x', "a == 1 b",
             "a != “x”", "a != [1]", "a != x;", "a != x,y", "a != b||c", "a != (b)", "a != `x`"]
)  # fmt: skip
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"sources\.web\.filter .* cannot be read at"):
        spec("jsonl", ["*"], filter=text)


@pytest.mark.parametrize("value", [r'"a\d"', r'"\u12"', r'"C:\x"'])
def test_quotes_around_what_is_no_json_are_no_part_of_the_text(value: str) -> None:
    with pytest.raises(ValueError, match=r"has the value .*, which is no JSON text \(Invalid"):
        spec("jsonl", ["*"], filter=f"lang == {value}")


@pytest.mark.parametrize(
    "word", ["True", "False", "TRUE", "None", "NULL", "Null", "nil", "NaN", "-Infinity"]
)
def test_literals_of_other_languages_are_refused_in_filters(word: str) -> None:
    message = f"filter 'dup != {word}' has the value {word}: write true, false, null or a number"
    with pytest.raises(ValueError, match=message):
        spec("jsonl", ["*"], filter=f"dup != {word}")
    assert parse_filter(f'dup != "{word}"')[0].value == word


def test_filter_values_are_json_or_bare_words() -> None:
    values = [c.value for c in parse_filter('a == 1 and b == "x y and z" and c == true and d == é')]
    assert values == [1, "x y and z", True, "é"]
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


@pytest.mark.parametrize("operator", ["==", "!=", "<", ">="])
@pytest.mark.parametrize(
    ("value", "literal", "kind"),
    [
        (True, "True", "a boolean, True"), (True, "1", "a boolean, True"),
        (1, "true", "a number, 1"), ("2024", "2024", "a text, '2024'"),
        (2024, '"2024"', "a number, 2024"), (Decimal("0.5"), "half", r"a number, Decimal\('0.5'\)"),
        (["a"], "a", r"a list, \['a'\]"),
    ],
)  # fmt: skip
def test_a_filter_compares_values_of_one_type(
    value: object, literal: str, kind: str, operator: str
) -> None:
    quoted = f'"{literal}"' if literal == "True" else literal
    comparison = parse_filter(f"a {operator} {quoted}")[0]
    with pytest.raises(ValueError, match=f"compares a {operator} .*, but that field is {kind}: "):
        comparison.holds(value)


@pytest.mark.parametrize(
    ("text", "value", "passes"),
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
    ],
)  # fmt: skip
def test_equality_in_filters(text: str, value: object, passes: bool) -> None:
    assert parse_filter(text)[0].holds(value) is passes


@pytest.mark.parametrize(("text", "value"), [("a < 3", None), ("a >= null", 3)])
def test_null_has_no_order(text: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"filter compares {text}, but that field is "):
        parse_filter(text)[0].holds(value)


def test_a_reading_goes_on_where_it_stopped(corpus: Path) -> None:
    everything = [*sources(corpus, filter="meta.score != 0.5", max_documents=17)]
    everything.append(spec("text", [corpus / "texts" / "*"], max_bytes=200))
    for source in everything:
        whole = list(Documents(source))
        for stop in range(len(whole) + 1):
            reader = Documents(source)
            iterator = iter(reader)
            first = [next(iterator) for _ in range(stop)]
            state = json.loads(json.dumps(reader.state()))
            assert first + list(Documents(source, state)) == whole, (source, stop)


def test_a_subsample_depends_on_the_content_alone(tmp_path: Path) -> None:
    texts = [f"text number {i}" for i in range(4000)]
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    (tmp_path / "b.jsonl").write_bytes(lines([{"text": text} for text in reversed(texts)]))
    read = [
        list(read_documents(spec("jsonl", [tmp_path / name], subsample=0.2)))
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert read[0] == read[1][::-1]
    assert abs(len(read[0]) - 800) < 100
    fewer = set(read_documents(spec("jsonl", [tmp_path / "a.jsonl"], subsample=0.1)))
    assert fewer < set(read[0])


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40))
def test_duplicates_are_those_that_came_before(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("dedup")
    (folder / "a.jsonl").write_bytes(lines([{"text": text} for text in texts]) or b"\n")
    source = spec("jsonl", [folder / "a.jsonl"])
    marks = find_duplicates(source, folder)
    kept = [document.text for document in Documents(source, None, marks)]
    assert kept == list(dict.fromkeys(texts))
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_caps_cut_the_last_document(corpus: Path) -> None:
    file = corpus / "a.jsonl"
    assert list(read_documents(spec("jsonl", [file], max_documents=3))) == TEXTS[:3]
    size = len(TEXTS[0].encode())
    assert list(read_documents(spec("jsonl", [file], max_bytes=size))) == TEXTS[:1]
    assert list(read_documents(spec("jsonl", [file], max_bytes=size + 3))) == [TEXTS[0], "doc"]
    # not through the middle of the two bytes of a letter
    assert list(read_documents(spec("jsonl", [file], max_bytes=size - 2))) == ["document 0 "]


def test_inputs_are_named_by_what_the_glob_left_open(corpus: Path) -> None:
    names = [item.name for item in Documents(spec("text", [corpus / "texts" / "*"])).inputs]
    assert names[:2] == ["00.txt", "01.txt.gz"]
    names = [item.name for item in Documents(spec("text", [corpus / "**" / "*.txt"])).inputs]
    assert names[0] == "texts/00.txt"


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude42"}\n')
    assert list(read_documents(spec("jsonl", [tmp_path / "a.jsonl"]))) == ["a\ufffd b 🙂"]


def test_line_breaks_inside_of_strings_do_not_part_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\u0085c"}\n\n{"text": "d"}\n', "utf-8")
    assert list(read_documents(spec("jsonl", [tmp_path / "a.jsonl"]))) == ["a\u2028b\u0085c", "d"]


def refuse(source: SourceSpec, *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        list(read_documents(source))
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("kind", "fields", "parts"),
    [
        ("jsonl", {"text_field": "body"}, ("a.jsonl:1: no field 'body'", "lang, meta, text")),
        ("jsonl", {"filter": "year > 3"}, ("a.jsonl:1: no field 'year'",)),
        ("parquet", {"text_field": "body"}, ("all.parquet: no field 'body'", "lang, meta, text")),
        ("parquet", {"filter": "meta.x == 1"}, ("all.parquet, row 1: no field 'meta.x'",)),
        ("huggingface", {"text_field": "body"}, ("hub, row 1: no field 'body'",)),
    ],
)
def test_a_missing_field_is_named_with_its_place(
    corpus: Path, kind: str, fields: dict[str, str], parts: Sequence[str]
) -> None:
    if kind == "huggingface":
        pytest.importorskip("datasets")
        refuse(spec(kind, path=str(corpus / "hub"), **fields), *parts)
    else:
        file = {"jsonl": "a.jsonl", "parquet": "all.parquet"}[kind]
        refuse(spec(kind, [corpus / file], **fields), *parts)


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', (":2: not a line of JSON",)),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", (":1: not a line of JSON",)),
        ("a.jsonl", b'["text"]\n', (":1: expected an object",)),
        ("a.jsonl", b'{"text": null}\n', ("field 'text' must be text, found None", "!= null")),
        ("a.jsonl", b'{"text": 5}\n', ("must be text, found 5: name another text_field",)),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS))[:-20], ("a.jsonl.gz: broken or cut off",)),
        ("a.jsonl.gz", b"plain text\n", ("a.jsonl.gz: broken or cut off",)),
        ("a.jsonl.zst", zstandard.compress(lines(RECORDS))[:-20],
         ("broken or cut off", "ends too early")),
        ("a.jsonl.zst", b"plain text\n", ("a.jsonl.zst: broken or cut off",)),
        ("a.parquet", b"PAR1 nothing PAR1", ("a.parquet: not a readable parquet file",)),
        ("a.text", b"abc\xff", ("a.text: byte 3 is not UTF-8",)),
        ("a.text", "hallo".encode("utf-16-le"), ("a.text is an archive of tar, or UTF-16",)),
        ("a.text", "hallo".encode("utf-16-be"), ("a.text is an archive of tar, or UTF-16",)),
        ("a.text", tar("one.txt", b"hallo"), ("a.text is an archive of tar, or UTF-16",)),
        ("a.text", b"abcd" * 100, ("a document of 0 MiB in a.text is larger than",)),
        ("other", b"", ("source web: no file matches",)),
    ],
)  # fmt: skip
def test_broken_inputs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, parts: Sequence[str]
) -> None:
    if name == "a.text":
        monkeypatch.setattr("nemo_rod.corpus.documents.MAX_DOCUMENT_BYTES", 300)
    (tmp_path / name).write_bytes(data)
    kind = name.split(".")[1] if name != "other" else "jsonl"
    refuse(spec(kind, [tmp_path / "a.*"]), *parts)


def test_damage_that_only_a_checksum_of_parquet_shows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": [f"the quick brown fox {i}" for i in range(100)]})
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, tmp_path / "a.parquet", **plain)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[data.index(b"fox 50")] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    refuse(spec("parquet", [tmp_path / "a.parquet"]), "a.parquet: not a readable parquet", "CRC")


def test_what_unpacks_to_more_than_memory_is_refused_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(b"a" * (256 << 20))
    assert len(packed) < 20_000
    for name in ("a.jsonl.zst", "a.txt.zst"):
        (tmp_path / name).write_bytes(packed)
    file = TextFile(tmp_path / "a.txt.zst", "a", spec("text", [tmp_path]))
    pieces = [len(piece) for piece in file.chunks()]
    assert sum(pieces) == 256 << 20 and max(pieces) <= 128 << 20
    for limit in ("MAX_DOCUMENT_BYTES", "MAX_LINE_BYTES"):
        monkeypatch.setattr(f"nemo_rod.corpus.formats.{limit}", 64 << 20)
    refuse(spec("jsonl", [tmp_path / "a.jsonl.zst"]), "zst: a line of more than 64 MiB: split")
    refuse(spec("text", [tmp_path / "a.txt.zst"]), "zst: one document of more than 64 MiB: split")


READ_ONE = """
import sys
import pyarrow as pa
from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.documents import Documents
spec = SourceSpec(name="x", role="replay", kind="parquet", files=[sys.argv[1]])
print(len(next(iter(Documents(spec))).text), pa.default_memory_pool().max_memory())
"""


def test_rows_of_parquet_unpack_a_few_at_a_time(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.array(["a" * (8 << 20)]).dictionary_encode().take(pa.array([0] * 300))
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", READ_ONE, str(tmp_path / "a.parquet")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    length, most = map(int, said.split())
    assert length == 8 << 20
    assert most < 256 << 20  # of 2.3 GiB


def test_marks_are_read_bit_by_bit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": str(i)} for i in range(11)]))
    drop = np.array([0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0], dtype=bool)
    read = Documents(spec("jsonl", [tmp_path / "a.jsonl"]), None, np.packbits(drop))
    assert [int(document.text) for document in read] == np.flatnonzero(~drop).tolist()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset as the hub has them: configurations with splits, each of several files."""
    folder = tmp_path_factory.mktemp("hub")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    pytest.importorskip("datasets")
    splits = {"web": ("wiki", "forum"), "legal": ("train",)}
    card = ["---", "configs:"]
    for config, names in splits.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split in names:
            card += [f"  - split: {split}", f"    path: {config}/{split}/*.parquet"]
            (folder / config / split).mkdir(parents=True)
            for part in range(5):
                rows = [f"{split} {part} {row}" for row in range(3)]
                parquet.write_table(
                    table({"text": rows}), folder / config / split / f"{part}.parquet"
                )
    (folder / "README.md").write_text("\n".join([*card, "---", "A card"]))
    return folder


def parts(split: str, *numbers: int) -> list[str]:
    return [f"{split} {part} {row}" for part in numbers for row in range(3)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"subset": "legal"}, parts("train", 0, 1, 2, 3, 4)),
        ({"subset": "web", "split": "wiki"}, parts("wiki", 0, 1, 2, 3, 4)),
        ({"subset": "legal", "max_files": 2}, parts("train", 0, 2)),
        ({"subset": "legal", "max_files": 9}, parts("train", 0, 1, 2, 3, 4)),
        ({"subset": "web", "split": "forum", "max_files": 1}, parts("forum", 0)),
        ({"subset": "web", "split": "all"}, parts("forum", *range(5)) + parts("wiki", *range(5))),
        (
            {"subset": "web", "split": "all", "max_files": 4},
            parts("forum", 0, 2) + parts("wiki", 0, 2),
        ),
    ],
)
def test_configurations_splits_and_files_of_a_hub_dataset(
    hub: Path, fields: dict[str, Any], expected: list[str]
) -> None:
    source = spec("huggingface", path=str(hub), **fields)
    assert list(read_documents(source)) == expected
    documents = Documents(source)
    reading = iter(documents)
    head = [next(reading).text for _ in range(4 if len(expected) > 4 else 2)]
    rest = [document.text for document in Documents(source, documents.state())]
    assert head + rest == expected


def test_what_a_hub_dataset_lacks_is_named(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refuse(spec("huggingface", path=str(tmp_path / "none")), "cannot be opened")
    refuse(spec("huggingface", path=str(hub), subset="web"), "Bad split: train", "check path")
    refuse(spec("huggingface", path=str(hub), subset="news"), "news", "check path, subset")


def test_max_files_spreads_over_the_sorted_paths(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number))
    for count, expected in ((3, "036"), (10, "0123456789"), (1, "0")):
        source = spec("text", [tmp_path / "*.txt"], max_files=count)
        assert "".join(read_documents(source)) == expected


@pytest.mark.parametrize("fields", [{}, {"text_field": "body", "filter": "text != null"}])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, fields: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    names = ["text", "body", "text", "id", "id"]
    table = pyarrow.Table.from_arrays([pyarrow.array([name]) for name in names], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    file = [tmp_path / "a.parquet"]
    refuse(spec("parquet", file, **fields), "a.parquet: 2 columns are named 'text': remove or")
    assert list(read_documents(spec("parquet", file, text_field="body"))) == ["body"]


def test_parquet_whose_text_is_no_unicode_names_its_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["abcdefgh" * 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="none")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"abcdefgh" * 4, b"\xff" * 32))
    spec = SourceSpec(name="x", role="replay", kind="parquet", files=[f"{tmp_path}/*.parquet"])
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        list(read_documents(spec))
