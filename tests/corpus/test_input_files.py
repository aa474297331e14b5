"""Which files a source has: each once, none left out without a word, here and on any storage."""

import base64
import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_cases import (
    manifest,
    read_documents,
    refuse,
    run,
    source,
    texts,
    web,
    write,
    write_parquet,
)

from nemo_rod.corpus.input_files import matching_files

zstandard = pytest.importorskip("zstandard")


BESIDE = ["a.jsonl", "b.jsonl"]
ALL = [*BESIDE, "sub/c.jsonl"]


def names(*files: str | Path) -> list[str]:
    return [name for _, name in matching_files(web(*files))]


def link(path: str, target: str) -> Callable[[Path], None]:
    return lambda root: (root / path).symlink_to(target)


def nothing(root: Path) -> None:
    """What is there is enough."""


def has(path: str) -> Callable[[Path], object]:
    return lambda root: write(root / path, ["x"])


def make(root: Path) -> Path:
    """Two files and what people have beside them."""
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden/d.jsonl"):
        write(root / "data" / name, [name])
    return root / "data"


@pytest.mark.parametrize(
    ("patterns", "changes", "expected"),
    [
        (["*.jsonl"], (), BESIDE),
        (["**/*.jsonl"], (), ALL),
        (["*/c.jsonl", "s*/**/?.jsonl", "[a]*"], (), ["a.jsonl", "sub/c.jsonl"]),
        # one file, one identity
        (["a.jsonl", "*a.jsonl", "../data/a.jsonl", "./a.jsonl"], (), ["a.jsonl"]),
        (["**/*.jsonl"], [link(f"l{i}", ".") for i in range(9)], ALL),
        (["**/*.jsonl"], [link("0", "sub")], ALL),
        # a run is left out, unless it is named
        (["**/*.jsonl"], [has("runs/a/launch/stages/b.jsonl"), has("runs/a/c.jsonl")], ALL),
        (["runs/a/**/c.jsonl"], [has("runs/a/launch/stages/b.jsonl"), has("runs/a/c.jsonl")],
         ["c.jsonl"]),
        (["*.jsonl"], [link("0.jsonl", "b.jsonl"), link("1.jsonl", "0.jsonl")], BESIDE),
        (["*.jsonl"], [link("0.jsonl", "sub/c.jsonl"), link("1.jsonl", "sub/c.jsonl")],
         ["0.jsonl", *BESIDE]),
        (["*.jsonl"], [lambda root: os.link(root / "b.jsonl", root / "c.jsonl")], BESIDE),
        # a name that exists as written
        (["a[1].jsonl"], [has("a[1].jsonl"), has("a1.jsonl")], ["a[1].jsonl"]),
        (["v[1]/*.jsonl"], [has("v[1]/a.jsonl"), has("v1/b.jsonl")], ["a.jsonl"]),
        (["what?.jsonl"], [has("what?.jsonl"), has("whats.jsonl")], ["what?.jsonl"]),
    ],
)  # fmt: skip
def test_each_file_once(tmp_path, patterns, changes, expected):
    data = make(tmp_path)
    for change in changes:
        change(data)
    assert names(*(f"{data}/{pattern}" for pattern in patterns)) == expected


@pytest.mark.parametrize(
    ("patterns", "change", "sentence"),
    [
        (["*.jsonl"], link("c.jsonl", "gone"), "c.jsonl is a link to 'gone', which cannot be"),
        (["*/c.jsonl"], link("more", "gone"), "more is a link to 'gone', which cannot be reached"),
        (["*.jsonl"], link("c.jsonl", "c.jsonl"), "c.jsonl is a link to 'c.jsonl', which"),
        (["*.jsonl"], lambda root: (root / "c.jsonl").mkdir(), "c.jsonl is a folder: name its"),
        (["*"], nothing, "sub is a folder: name its files, as in"),
        (["*.jsonl"], lambda root: os.mkfifo(root / "c.jsonl"), "c.jsonl is no regular file"),
        (["*.txt"], nothing, "no file matches "),
        (["/"], nothing, "is a folder: name its files, as in"),
        (["x" * 256 + "/a.jsonl"], nothing, "File name too long"),  # nor may others be looked for
        (["**.jsonl"], nothing, "**.jsonl: ** stands for whole folders: write **/, as in **/*.t"),
        (["**"], lambda root: os.rename(root / "sub", os.fsencode(root / "s") + b"\xff"),
         "the file name 's\\udcff/c.jsonl' is not UTF-8"),
    ],
)  # fmt: skip
def test_what_matches_and_cannot_be_read_is_named_before_any_work(
    tmp_path, patterns, change, sentence
):
    data = make(tmp_path)
    change(data)
    good = source("good", [write(tmp_path / "good.jsonl", texts(60, 1))], role="adaptation")
    with pytest.raises(ValueError) as error:
        run(tmp_path / "blocks", [good, web(*(f"{data}/{pattern}" for pattern in patterns))])
    assert str(error.value).startswith("source web: ") and sentence in str(error.value)
    assert not (tmp_path / "blocks").exists()


def zst(data: bytes, **parameters: int) -> bytes:
    chosen = zstandard.ZstdCompressionParameters(**parameters)
    return bytes(zstandard.ZstdCompressor(compression_params=chosen).compress(data))


def streamed(data: bytes) -> bytes:
    """As `zstd --long=31 < FILE`: without a size, the window is what it was told to be."""
    chosen = zstandard.ZstdCompressionParameters(window_log=31, strategy=1)
    out = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=chosen).stream_writer(
        out, closefd=False
    ) as writer:
        writer.write(data)
        writer.flush(zstandard.FLUSH_BLOCK)
    return out.getvalue()


DICTIONARY = zstandard.train_dictionary(
    999, [f'{{"text": "{number * 7919} {number}"}}'.encode() for number in range(500)]
)
ONE, TWO = b'{"text": "one"}\n', b'{"text": "two"}\n'


@pytest.mark.parametrize(
    ("suffix", "members"),
    [
        (".gz", [gzip.compress(ONE + TWO, mtime=0)]),
        (".GZ", [gzip.compress(ONE, mtime=0), gzip.compress(TWO)]),
        (".bz2", [bz2.compress(ONE), bz2.compress(TWO)]),
        (".xz", [lzma.compress(ONE), lzma.compress(TWO)]),
        (".xz", [lzma.compress(ONE + TWO, check=lzma.CHECK_SHA256, preset=9)]),
        (".ZST", [zst(ONE), b"P*M\x18\x03\0\0\0abc", zst(TWO)]),
        (".zst", [streamed(ONE + TWO)]),
    ],
)
def test_compressed_files_here_and_elsewhere(tmp_path, suffix, members):
    fsspec = pytest.importorskip("fsspec")
    data, name = b"".join(members), f"a.jsonl{suffix}"
    (tmp_path / name).write_bytes(data)
    root = f"/{tmp_path.name}/v[1]"
    fsspec.filesystem("memory").pipe({f"{root}/{name}": data, f"{root}/deep/b.jsonl": TWO})
    for file in (tmp_path / name, f"file://{tmp_path}/a.*", f"memory:/{root}/{name}"):
        assert list(read_documents(web(file))) == ["one", "two"]
    everything = f"memory://{tmp_path.name}/v*/**"
    assert list(read_documents(web(everything))) == ["one", "two", "two"]
    assert names(everything) == [f"v[1]/{name}", "v[1]/deep/b.jsonl"]
    whole = [len(b"".join(members[:number])) for number in range(1, len(members) + 1)]
    cut = [data[:size] for size in {*range(len(data))} - {*whole}]
    begins = [number + data.index(member) for member in members[1:] for number in (0, 1)]
    hit = [data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :] for place in begins]
    for damaged in (*cut, *hit, data + b"what a proxy says"):
        (tmp_path / name).write_bytes(damaged)
        refuse(web(tmp_path / name), "source web: ", ": broken or cut off ")


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_padding_between_members_is_no_end(tmp_path, suffix, pack):
    name = tmp_path / f"a.jsonl{suffix}"
    name.write_bytes(pack(ONE) + b"\0" * 9000 + pack(TWO) + b"\0" * 512)
    assert list(read_documents(web(name))) == ["one", "two"]


NO_TEXTS = {  # by what the sentence says; of the bytes that another encoding or no text has
    "a.txt: a part of it is zeros or control characters, not text: convert it, or fetch it again": [
        bytes(9), b"text" * 9999 + bytes(99) + b"text", b"\n\5hello\x12\3abc", b"\0asm\1\0\0\0\1",
        b"GIF89a\1\0\1\0\0\0\0\0;", b"\x7fELF\2\1\1" + bytes(9) + b"\2\0>\0\1\0\0\0hello",
        b"ID3\3\0\0\0\0\0\x1fTIT2\0\0\0\6\0\0\0hello", "Привет, мир".encode("utf-16-le"),
    ],
    "a.txt: it is UTF-16, UTF-32 or ISO-2022: convert it": [
        *("hallo".encode(f"utf-{width}") for width in ("16-le", "16-be", "32-le")),
        "日本語".encode("iso2022_jp"), "한국어".encode("iso2022_kr"),
    ],
    "is not UTF-8: convert the file, or": [b"a\xff", "日本".encode("sjis"), "dür".encode("cp037")],
    "is not the data, but a program's word for none": [b"None", b"nan\n", b"{ }", b"[null]"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("a.jsonl", gzip.compress(ONE, mtime=0), "it is compressed: let its name end in .gz"),
        ("a.jsonl.zst", zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(ONE * 9),
         "Dictionary mismatch: it was compressed with a dictionary; decompress it"),
        ("a.jsonl", b'[\n{"text": "one"}\n]', "a.jsonl:1: not a line of JSON (Expecting value: "),
        ("a.jsonl", b'[{"text": "one"}]', "a list: write one object per line (jq -c . "),
        ("a.jsonl", ONE + b'{"text": ', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n", "a.jsonl:1: not a line of JSON"),
        ("a.jsonl", b'["text"]\n', "a.jsonl:1: expected an object"),
        ("a.jsonl", b'{"text": null}\n', "or drop such records with filter: text != null"),
        ("a.jsonl", b'{"text": 5}\n', "must be text, found 5: name another text_field"),
        ("a.jsonl.gz", b"plain text\n", "a.jsonl.gz: broken or cut off"),
        ("a.jsonl.zst", b"plain text\n", "a.jsonl.zst: broken or cut off"),
        ("a.jsonl.zst", zstandard.compress(ONE * 9)[:-2], "broken or cut off .zst data (it ends"),
        ("a.parquet", b"PAR1 nothing PAR1", "a.parquet: not a readable parquet file"),
        ("_metadata.parquet", b"PAR1 of Spark PAR1", "): leave it out"),
        ("a.jsonl", b'{\n"text": "one"}', "one object per line (jq -c . FILE; of a list: jq -c '."),
        ("a.jsonl", '{"text": "grün"}'.encode("latin-1"), "a.jsonl:1: it is not UTF-8: convert"),
        ("a.jsonl", ONE.decode().encode("utf-16"), "a.jsonl: it is UTF-16,"),
        ("a.jsonl.gz", gzip.compress(ONE.decode().encode("utf-32"), mtime=0), "gz: it is UTF-16,"),
        ("a.txt", "a text ü".encode()[:-1], "byte 7 is not UTF-8: fetch it again if it was"),
        ("a.tar", b"one.txt".ljust(257, b"\0") + b"ustar", "a.tar: it is an archive: unpack it"),
        ("a.zip", b"PK\3\4\x14\0", "a.zip: it is an archive: unpack it"),
        ("a.txt", b"%PDF-1.7\n1 0 obj", "a.txt: it is a document or database: extract"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1", "a.doc: it is a document or database: extract"),
        ("a.json", b"PAR1\x15\4\x15", "a.json: it is parquet: set kind: parquet"),
        ("a.txt", b"<script>x()</script>", "is not the data, but an HTML page, as servers answer"),
        ("a.txt", b'<div id="root">\n<!-- a --></div>', "is not the data, but an HTML page"),
        ("a.txt", b"<!-- a -->\n<form><b>Please sign in</b>", "is not the data, but an HTML page"),
        ("a.2.txt", b"<!--" + b" of a licence" * 400, "is not the data, but an HTML page"),
        *((f"a.txt.{name}", b"The cat sat", "is not the data, but an unfinished download: fetch it")
          for name in ("crdownload", "part", "download", "aria2", "incomplete")),
        *(("a.txt", data, sentence) for sentence, files in NO_TEXTS.items() for data in files),
    ],
)  # fmt: skip
def test_what_is_no_json_lines_file_says_what_to_do(tmp_path, name, data, sentence):
    (tmp_path / name).write_bytes(data)
    kind = "parquet" if name.endswith(".parquet") else "jsonl" if ".json" in name else "text"
    refuse(web(tmp_path / name, kind=kind), f"source web: {tmp_path / name}", sentence)


PACKED = zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(ONE)
CURES = [  # the file, its filter, the command in its refusal, and what is read after that
    (b'{\n"text": "one"}', None, r"jq -c \. FILE", ["one"]),
    (b'[{"text": "one"}, {"text": "two"}]', None, r"jq -c '\.\[\]' FILE", ["one", "two"]),
    (ONE + b'{"text": "two", "dup": 1}\n', "dup == null", r"jq -c 'select[^']*' FILE", ["one"]),
    (PACKED, None, "zstd -d -D FILE", ["one"]),
]


@pytest.mark.parametrize(("data", "condition", "command", "expected"), CURES)
def test_commands_that_refusals_name_cure(data, condition, command, expected, tmp_path):
    file, cured = tmp_path / f"a.jsonl{'.zst' * (data is PACKED)}", tmp_path / "cured.jsonl"
    file.write_bytes(data)
    (tmp_path / "dictionary").write_bytes(DICTIONARY.as_bytes())
    with pytest.raises(ValueError) as refusal:
        list(read_documents(web(file, filter=condition)))
    (said,) = re.findall(command, str(refusal.value))[:1]
    if shutil.which(said.split()[0]) is None:
        pytest.skip(f"{said.split()[0]} is not installed")
    words = said.replace("FILE", "dictionary <FILE" if data is PACKED else "FILE")
    line = f"{words.replace('FILE', file.name)} >{cured.name}"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert list(read_documents(web(cured))) == expected


PLACEHOLDERS = {  # by what the sentence says
    "pointer of Git LFS: run git lfs pull": [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\r\noid sha256:0\r\nsize 9\r\n",
    ],
    "pointer of git-annex: run git annex get": [
        b"/annex/objects/MD5E-s5--5d41402abc4b2a76b9719d911017c592.txt\n",
        b"..\\.git\\annex\\objects\\x\\y",
    ],
    "pointer of DVC: run dvc pull": [
        b"outs:\n- md5: a1b2\n  size: 3\n", b"outs:\n- path: a.txt\n  hash: md5\n  md5: a1\n",
        b"md5: a1\nfrozen: true\ndeps:\n- path: a\nouts:\n- md5: b2\n",
    ],
    "a pointer of Xet: fetch the file again": [b"# xet version 0\nfilesize = 400\nhash = 'a'\n"],
    "an HTML page, as servers answer: fetch the": [
        b"<!DOCTYPE html>\n<html><body>404</body></html>",
        b"\xef\xbb\xbf\r\n<html>\r\n<head><title>502 Bad Gateway</title>",
        b'<?xml version="1.0"?>\n<!-- x -->\n<!doctype HTML PUBLIC "">',
        b"<center>\n<h1>503 Service Temporarily Unavailable</h1></center>",
        b"<p>The requested URL was not found on this server.</p>", b"<p>Not found</p>",
    ],
    "a storage's answer in XML: fetch the file": [
        b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchKey</Code>',
        b'<?xml version="1.0"?><EnumerationResults ServiceEndpoint="x">',
        b'<?xml version="1.0"?><error xmlns="x"><code>NoSuchBucket</code>',
        b'<d:error xmlns:d="DAV:">\n  <s:exception>Sabre</s:exception>',
        b'<ErrorResponse xmlns="x"><Error><Type>Sender</Type>',
        b'<m:error xmlns:m="x"><m:code></m:code>', b'<problem xmlns="urn:ietf:rfc:7807"><title>',
    ],
    "a server's error: fetch the": [
        b'{"error": "Repository not found"}', b"Entry not found\n",
        b'{"error": "We cannot find this page.", "code": 404}',
        b"upstream connect error or disconnect/reset before headers",
        b"Access to model a/b is restricted. You must log in.", b"error code: 1020",
        b"HTTP/1.1 404 Not Found\r\nServer: x\r\n\r\nnot here",
        b'{"timestamp": "2024", "status": 404, "error": "Not Found", "path": "/x"}',
        b'{"error": {"errors": [{"domain": "%s"}], "code": 403}}' % (b"x" * 1000),
        b'{"odata.error":{"code":"ResourceNotFound","message":{"value":"x"}}}',
        b'{"__type":"AccessDeniedException","Message":"User is not authorized"}',
        b'[{"error": "not found"}]', b"You need to enable JavaScript to run this app.",
        b"Error 404", b"Sorry, the page you are looking for is gone.", b"Token has expired",
        b"fatal: repository 'https://x/' not found", b"Too many requests, wait a minute.",
        b"410 Gone\n", b"416 Range Not Satisfiable", b"451 Unavailable For Legal Reasons",
        b"400: Invalid request\n", b"SlowDown: Please reduce your request rate.\n",
        b"You have exceeded a secondary rate limit. Please wait a few minutes.\n",
        b"\nAn error occurred (AccessDenied) when calling the GetObject operation: Denied\n",
        b"AccessDeniedException: 403 a@b does not have storage.objects.get access\n",
        b"--2024-01-01 10:00:00--  https://x.org/a.txt\nResolving x.org... failed: Name\n",
        b"  % Total    % Received % Xferd  Average Speed   Time\n",
        b"Repository Not Found for url: https://x.co/y.\nPlease make sure you specified\n",
        b'{"data": null, "errors": [{"message": "x"}]}', b'{"success": false, "result": null}',
        b'{"ok": false, "description": "Unauthorized", "error_code": 401}',
        b'{"status": "error", "data": {"reason": "expired"}}',
        b'{"message": "Entity not found: file", "code": "EntityNotFound"}',
        b'{"errors": [{"detail": "Not found."}], "meta": {"version": "2.0"}}',
        b'{"detail": [{"loc": ["query", "x"], "msg": "field required"}]}',
        b'{"status": "ERROR", "code": 403, "message": "x", "requestUrl": "http://x/api"}',
    ],
    "a link to it: fetch the file that it names": [
        b"[InternetShortcut]\r\nURL=https://x.org/a.txt",
        b"[Desktop Entry]\nName=a\nType=Link\nURL=https://x\n", b"../raw/a.txt",
        b'{"":"WARNING! DO NOT EDIT THIS FILE!","doc_id":"1"}', b"s3://bucket/key/a.txt\n",
        b"https://x.org/data/a.txt\n", b"magnet:?xt=urn:btih:c12fe1c06bba254a9&dn=a\n",
    ],
    "a property list, as Apple keeps links in": [
        b'<!DOCTYPE plist PUBLIC "x" "y">\n<plist version="1.0">\n<dict>\n<key>URL</key>',
        b"bplist00",
    ],
    "a digest of it: fetch": [
        b"d41d8cd98f00b204e9800998ecf8427e  a.txt\n",
        b"d41d8cd98f00b204e9800998ecf8427e  my a.txt\r\n0cc175b9c0f1b6a831c399e269772661 *b.txt",
        b"SHA256 (a.txt) = e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n" * 99,
    ],
    "a wrapping of other things (mails, cards, bytes as letters): extract their": [
        b"From a@b.org Sat Jan  3 01:05:34 1996\nFrom: A\n", b"BEGIN:VCARD\r\nFN:A\r\n",
        base64.encodebytes(PACKED * 99), b"begin 644 a\n#86)C\n`\nend\n", pickle.dumps([1], 0),
    ],
    "encrypted: decrypt it": [
        b"-----BEGIN PGP MESSAGE-----\nVersion: GnuPG v2\n",
        b"$ANSIBLE_VAULT;1.1;AES256\n62313365396662343061393464336163\n",
        b'{"data": "ENC[AES256_GCM,data:CwE4O1s=]", "sops": {"kms": []}}',
    ],
}  # fmt: skip
ANSWERED = [(data, sentence) for sentence, files in PLACEHOLDERS.items() for data in files]


@pytest.mark.parametrize(
    "kind", ["text", "jsonl", "jsonl.gz", "text.xz", "parquet", "megatron", "huggingface"]
)
@pytest.mark.parametrize(("data", "sentence"), ANSWERED)
def test_what_stands_for_the_data_is_refused(tmp_path, kind, data, sentence):
    folder, (kind, *packed) = tmp_path / "data", kind.split(".")
    folder.mkdir()
    file = folder / ".".join(
        ["a", {"megatron": "bin", "huggingface": "jsonl"}.get(kind, kind), *packed]
    )
    file.write_bytes(lzma.compress(data) if packed == ["xz"] else data)
    (folder / "a.idx").write_bytes(data)
    if kind == "huggingface":
        pytest.importorskip("datasets")
    place = {"path": str(folder)} if kind == "huggingface" else {}
    files = [] if place else [folder / "a" if kind == "megatron" else file]
    refuse(web(*files, kind=kind, **place), " is not the data, but ", sentence)


UNUSUAL = [
    "ACGTACgt" * 99, "页。\x0c" * 9, "N\bNA\bA _\bf\n" * 9, "\x1b[31mno\x1b(B\n" * 9, "DOS\r\n\x1a",
    "!function(e){var n=0;n<9&&e(n)}(this);" * 9, "a\x1fb\x1e" * 9, "\x0bb\x07\x85c", "a " * 99_999,
    "From Monday on", "None of us", "مرحبا\u200f" * 9, "\\begin{a}\r%", "👩\u200d👩\u200d👧",
    "500 Miles", "404 words on loss", "https://a.org is\na site", "3" * 64 + "\n", "ab" * 300,
    "https://a.org/xX1" * 4 + "\n", "begin 2024 so", "Aachen\nzebra2\n" * 99,
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.html", "<html>a page that is meant</html>"),
        ("a.htm.gz", "<!DOCTYPE html>"),
        ("a.txt", "A text about <html> and version https://git-lfs.github.com/spec/v1"),
        ("a.xml", "<?xml version='1.0'?><Errors><Error>a log</Error></Errors>"),
        ("a.txt", "2023"),
        ("a.json", '{"title": "Not found in the book", "message": "hello"}'),
        ("a.json", '{"error": "of a parser", "text": "what it was"}'),
        ("a.json", '{"data": {"found": "a record"}, "errors": null}'),
        ("a.json", '{"text": "a record", "success": false}'),
        ("README.md", '<div align="center">A library</div>'),
        ("a.vue", "<script setup>let a</script>"),
        ("a.json", "{}"),
        ("a.txt", "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\nA text that is meant"),
        ("a.txt", "../ is the folder above"),
        ("a.txt", '<div align="center">\n\n# A library\n</div>'),
        ("a", "<!-- SPDX-License-Identifier: MIT -->\nA text that is meant"),
        ("a.txt.gz", "<script>x()</script> was its first line" + " No error. Not found." * 40),
        ("a.txt", "<!doctor> 2 of <divine>\0" + "<!-- -->" * 400),
        *(("a.txt", text) for text in UNUSUAL),
    ],
)
def test_texts_like_placeholders_are_read(tmp_path, name, data):
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(data.encode()))
    assert list(read_documents(web(tmp_path / name, kind="text"))) == [data]


@pytest.mark.parametrize(
    ("condition", "read"),
    [
        ("text != null", ["a", "c"]),
        ('text != null and lang != null and lang == "de"', ["c"]),
        ("lang != null and meta.x != null and text != null", ["c"]),
    ],
)
def test_records_without_a_field_are_left_out(tmp_path, condition, read):
    rows = [{"text": "a"}, {"id": 1}, {"text": None}, {"text": "c", "lang": "de", "meta": {"x": 1}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_documents(web(tmp_path / "a.jsonl", filter=condition))) == read
    refuse(web(tmp_path / "a.jsonl", filter='lang == "de"'), "a.jsonl:1: no field 'lang'",
           "leave records without it out: begin filter with lang != null")  # fmt: skip
    refuse(web(tmp_path / "a.jsonl"), ":2: no field 'text'", "begin filter with text != null")
    refuse(web(tmp_path / "a.jsonl", filter="lang == null"), "jq -c 'select(.lang == null)' FILE")


@pytest.mark.parametrize("row", [{"text:en": None}, {"id": 1}])
def test_a_filter_that_a_refusal_names_quotes_a_field_that_needs_it(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(f'{{"text:en": "a"}}\n{json.dumps(row)}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: ") as refusal:
        list(read_documents(web(tmp_path / "a.jsonl", text_field="text:en")))
    (said,) = re.findall('"text:en" .*', str(refusal.value))
    cured = web(tmp_path / "a.jsonl", text_field="text:en", filter=said)
    assert list(read_documents(cured)) == ["a"]


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("memory://nothing/*.jsonl", "no file matches 'memory://nothing/*.jsonl'"),
        ("nosuch://a/*.jsonl", "files 'nosuch://a/*.jsonl' cannot be listed: "),
        ("abfs://c/*.jsonl", "files 'abfs://c/*.jsonl' cannot be listed: Install adlfs"),
    ],
)
def test_a_storage_that_cannot_be_listed_is_named(pattern, sentence):
    pytest.importorskip("fsspec")
    refuse(web(pattern), f"source web: {sentence}")


def test_a_name_that_exists_is_no_pattern_on_any_storage(tmp_path):
    system = pytest.importorskip("fsspec").filesystem("memory")
    root = tmp_path.name
    system.pipe({f"/{root}/v[1]/a[2].jsonl": ONE, f"/{root}/v1/a2.jsonl": TWO})
    system.pipe({f"/{root}/v[1]/{name}": TWO for name in ("._a.jsonl", ".cache/b/c.jsonl")})
    for pattern, expected in (
        ("v[1]/*.jsonl", ["one"]),
        ("v[1]/a[2].jsonl", ["one"]),
        ("v[1]/**", ["one"]),  # hidden files are left out, as on disks
        ("v[1]/**/.c*/**/*.jsonl", ["two"]),
        ("v[1]/._a.jsonl", ["two"]),
        ("v?/a[2].jsonl", ["two"]),
        ("v[!2]/*", ["two"]),
    ):
        assert list(read_documents(web(f"memory://{root}/{pattern}"))) == expected, pattern
    with pytest.raises(ValueError, match=r"v1 is a directory: name its files, or leave it out"):
        names(f"memory://{root}/*1")
    file = write(tmp_path / "a.jsonl", ["x"])
    assert names(file, f"local://{file}", f"file://{file}", f"local://{tmp_path}/*") == ["a.jsonl"]


def test_parquet_and_text_on_another_storage(tmp_path):
    fsspec, root = pytest.importorskip("fsspec"), f"/{tmp_path.name}"
    pytest.importorskip("pyarrow")
    columns = {"text": ["one", "two"], "meta": [{"a": 1}, None]}
    here = write_parquet(tmp_path / "a.parquet", columns)
    marked = b"\xef\xbb\xbfone"  # by its byte order
    files = {f"{root}/a.parquet": here.read_bytes(), f"{root}/a.txt": marked}
    fsspec.filesystem("memory").pipe(files)
    for file in (here, f"memory:/{root}/*.parquet"):
        assert list(read_documents(web(file, kind="parquet"))) == ["one", "two"]
        for condition in ("meta.a != 1", "meta.a == null"):  # what is below null is null
            assert list(read_documents(web(file, kind="parquet", filter=condition))) == ["two"]
    assert list(read_documents(web(f"memory:/{root}/*.txt", kind="text"))) == ["one"]


def test_files_of_one_name_are_told_apart(tmp_path):
    files = [write(tmp_path / folder / "a.jsonl", texts(60, n)) for n, folder in enumerate("xyz")]
    for _ in range(2):
        run(tmp_path / "blocks", [web(*files)])
    names = [file["name"] for file in manifest(tmp_path / "blocks")["files"]]
    assert names == ["a.jsonl"] * 3
    for number, file in enumerate(files[:2], 1):
        before = file.read_bytes()
        write(file, ["more", *texts(60, number)])
        changed = rf"made otherwise: size of a.jsonl \(file {number}\) was "
        with pytest.raises(ValueError, match=changed):
            run(tmp_path / "blocks", [web(*files)])
        file.write_bytes(before)
