"""One class per input format: each yields the texts of one file and can start in its middle.

An input yields one item per record: the record's text, its token ids if the source is tokenised
already, or None if the filter drops it. With its `position`, which is plain JSON, `records` resumes
after the last record it yielded.
"""

from __future__ import annotations

import bz2
import codecs
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.filters import Comparison, lookup, parse_filter
from nemo_rod.corpus.input_files import HEAD, File, matching_files, refuse_placeholder
from nemo_rod.corpus.sources import SourceSpec, takes
from nemo_rod.corpus.tokenizer_identity import Tokenizer

LONG_BYTES = 16 << 20
MAX_DOCUMENT_BYTES = 128 << 20
MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES  # JSON may escape characters, and has other fields
_ONE_LINE = "write one object per line (jq -c . FILE; of a list: jq -c '.[]' FILE), or repair it"
_PACKED = "it is compressed: let its name end in .gz, .bz2, .xz or .zst"
_ARCHIVE, _WIDE = "it is an archive: unpack it", "it is UTF-16, UTF-32 or ISO-2022: convert it"
_OTHER = "it is a document or database: extract its text"
_FOREIGN = {  # (offset, bytes) of files that are not text in UTF-8 -> remedy
    (0, b"\x1f\x8b"): _PACKED, (0, b"\xfd7zXZ\0"): _PACKED, (0, b"\x28\xb5\x2f\xfd"): _PACKED,
    (4, b"1AY&SY"): _PACKED, (0, b"PK\3\4"): _ARCHIVE, (257, b"ustar"): _ARCHIVE,
    (0, b"\xff\xfe"): _WIDE, (0, b"\xfe\xff"): _WIDE, (0, b"\0\0\xfe\xff"): _WIDE,
    (0, b"%PDF-"): _OTHER, (0, b"%!PS"): _OTHER, (0, b"{\\rtf"): _OTHER,
    (0, b"\xd0\xcf\x11\xe0"): _OTHER, (0, b"SQLite format 3\0"): _OTHER,
    (0, b"PAR1\x15"): "it is parquet: set kind: parquet",
    (0, b"ARROW1\0\0"): "it is Arrow: set kind: huggingface, and path to its folder",
}  # fmt: skip
# control characters but those of old texts: backspace, form feed, ^Z, ESC, separators
_NO_TEXT = bytes([*range(7), *range(14, 26), 127])
_MACHINE = "a part of it is zeros or control characters, not text: convert it, or fetch it again"
_ESCAPES = re.compile(rb"\\(?:[^u]|u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4})*)")
_CURES = {  # part of an error about data that is not damaged -> remedy
    "ictionary": "it was compressed with a dictionary; decompress it with that, zstd -d -D FILE",
    "memory": "compress it again with a shorter window, without --long or --ultra",
}


@dataclass(frozen=True)
class LongText:
    """A text of `LONG_BYTES` or more; with one emoji, str would take four bytes a character."""

    utf8: bytes


# a document: its text, or its token ids without EOD
Content = str | LongText | NDArray[np.int32]


class ReadError(ValueError):
    """A source cannot be read to its end; the blocks before are worth keeping."""


class Input:
    """A file, or an equivalent, that texts are read from.

    Args:
        name: name in the manifest, independent of local paths.
        size: size in bytes; None if unknown.
        place: where it is, for error messages; None: its name.

    Attributes:
        parts: names and sizes of the files that it reads, if it stands for several.
        share: fraction of documents to keep, by content hash; multiplied with `subsample`.
        in_place: manifest entry of a file of token ids that are read in place, not copied.
        cure: what to do if it cannot be read.
        cut: whether the record yielded last was cut off, so that no end of document follows it.
    """

    share = 1.0
    cure = "repair the file or fetch it again"
    cut = False
    in_place: dict[str, Any] | None = None

    def __init__(self, name: str, size: int | None, place: str | None = None) -> None:
        self.name, self.size, self.place = name, size, place or name
        self.parts: list[tuple[str, int | None]] = []
        self._done = self._bytes = 0

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Sets the tokenizer before reading; refuses token ids made by another one."""

    def commit(self) -> str | None:
        """Returns the revision to which all reads are pinned; None if it has none."""
        return None

    def read(self, start: int) -> Iterator[Content | None]:
        """Yields the content of every record, from the one with the number `start` on."""
        raise NotImplementedError

    def records(self, position: Any) -> Iterator[Content | None]:
        """Yields the content of every record from `position` on (None: from the beginning)."""
        self._done = int(position or 0)
        for content in self.read(self._done):
            self._done += 1
            yield content
            del content  # frees memory before the next one is read

    def where(self) -> str:
        """Returns where it is being read, for error messages."""
        return self.place

    def position(self) -> Any:
        """Returns the position after the last record: by default, the number of records read."""
        return self._done

    def bytes_read(self) -> int:
        """Returns the number of bytes of the file read so far; 0 if unknown."""
        return self._bytes


class Extract:
    """Extracts the text of a record of a source if it passes the source's filter."""

    def __init__(self, spec: SourceSpec, *files: str) -> None:
        self.text_field, self.comparisons = spec.text_field, parse_filter(spec.filter)
        self.files = [*files]  # that are read, for error messages
        self.fields = [spec.text_field, *(comparison.field for comparison in self.comparisons)]

    def __call__(self, record: Any, where: str) -> str | LongText | None:
        """Returns the record's text, or None if the filter drops it.

        Raises:
            ValueError: the record is not as the source describes it; begins with `where`.
        """
        if not isinstance(record, Mapping):
            raise ValueError(f"{where}: expected an object with fields, found {record!r:.60}")
        try:
            for comparison in self.comparisons:
                try:
                    value = lookup(record, comparison.field)
                except KeyError:  # a writer may leave out a field that is null
                    if comparison.operator == "!=" and comparison.value is None:
                        return None
                    raise
                if isinstance(value, LongText):
                    value = value.utf8.decode()
                if not comparison.holds(value):
                    return None
            text = lookup(record, self.text_field)
        except KeyError as error:
            field = error.args[0]
            there, gone = Comparison(field, "!=", None), Comparison(field, "==", None)
            optional = f", or leave records without it out: begin filter with {there}"
            if gone in self.comparisons:
                optional = f", or keep records without it alone: jq -c 'select(.{gone})' FILE"
            raise ValueError(missing_field(where, field, record, self.files, optional)) from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(text, str | LongText):
            drop = f", or drop such records with filter: {Comparison(self.text_field, '!=', None)}"
            raise ValueError(
                f"{where}: field {self.text_field!r} must be text, found {text!r:.60}: "
                f"name another text_field{drop if text is None else ''}"
            )
        return text


def missing_field(where: str, field: str, found: Iterable[str], files: list[str], cure: str) -> str:
    """Returns the error message for a missing field; `cure` is that of an optional one."""
    names = ", ".join(sorted(str(name) for name in found)) or "none"
    if any(f"/{field}=" in f"/{file}" for file in files):  # a Hive partition
        cure = f"; the folder {field}=... is no field: name it in files, of kind: parquet say"
    set_it = "set text_field or filter to one of those"
    return f"{where}: no field {field!r} (found: {names}): {set_it}{cure}"


class InputFile(Input):
    """A file, compressed or not; `bytes_read` counts bytes as stored."""

    def __init__(self, path: File, name: str, spec: SourceSpec) -> None:
        super().__init__(name, path.stat().st_size, str(path))
        self.path, self._extract = path, Extract(spec, str(path))

    def chunks(self) -> Iterator[bytes]:
        """Yields its bytes, decompressed according to its suffix (.gz, .bz2, .xz, .zst, or none).

        Raises:
            ValueError: the compressed data is corrupt or truncated, or cannot be decompressed here.
        """
        suffix = self.path.suffix.lower()
        with self.path.open("rb") as handle:
            refuse_placeholder(self.path, handle.read(HEAD))
            handle.seek(0)
            whole = iter(lambda: handle.read(1 << 20), b"")
            packed = _unpack(handle, suffix) if suffix in _UNPACKERS else None
            try:
                for number, chunk in enumerate(filter(None, packed or whole)):
                    if packed and not number:
                        refuse_placeholder(self.path, chunk[:HEAD])
                    for (start, sign), cure in _FOREIGN.items() if not number else ():
                        if chunk.startswith(sign, start) and not (packed and cure is _PACKED):
                            raise ValueError(cure)
                    size, zeros = len(chunk), chunk.count(0)
                    if b"\x1b$" in chunk or (any(chunk[:64:2]) != any(chunk[1:64:2]) and size > 3):
                        raise ValueError(_WIDE)
                    others = size - zeros - len(chunk.translate(None, _NO_TEXT))
                    is_text = zeros <= min(size - 1, 2 + size / 10) and others <= 2 + size / 50
                    if bytes(64) in chunk or not is_text:
                        raise ValueError(_MACHINE)
                    self._bytes = handle.tell()
                    yield chunk
            except ValueError as error:
                here = "" if str(error).startswith(str(self.path)) else f"{self.path}: "
                raise ValueError(f"{here}{error}") from error


_UNPACKERS: dict[str, Callable[[], Any]] = {  # suffix -> decompressor of one member of a file
    ".gz": partial(zlib.decompressobj, 31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: (  # --long=31 needs the window
        import_module("zstandard").ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    ),
}


def _unpack(handle: IO[bytes], suffix: str) -> Iterator[bytes]:
    # The libraries' own readers accept a truncated last frame of zstd, and a damaged second member
    # of bz2 or xz.
    broken = f"broken or cut off {suffix} data ({{}}): fetch the file again"
    member, count, padding = None, 0, 0
    while chunk := handle.read(1 << 12):  # four bytes can stand for 128 KiB
        while chunk:
            if member is None:
                chunk = chunk.lstrip(b"\0") if count else chunk  # padding
                if not chunk:
                    if (padding := padding + 1) > 256:
                        raise ValueError("a megabyte after its end is empty: fetch it again")
                    break
                member, count = _UNPACKERS[suffix](), count + 1
            try:
                data = member.decompress(chunk)
            except Exception as error:  # each library has its own
                cures = (f"{error}: {cure}" for sign, cure in _CURES.items() if sign in str(error))
                raise ValueError(next(cures, broken.format(error))) from error
            chunk, member = (member.unused_data, None) if member.eof else (b"", member)
            yield data
    if member is not None or not count:
        raise ValueError(broken.format("it ends too early"))


class Unpacked(io.RawIOBase):
    """The bytes of an open compressed file; damage is refused by a ValueError that names it."""

    def __init__(self, handle: Any, suffix: str) -> None:
        self._place, self._chunks = handle.path, _unpack(handle, suffix)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer from the next bytes; returns their number, 0 at the end."""
        try:
            while not self._rest and (chunk := next(self._chunks, None)) is not None:
                self._rest = memoryview(chunk)
        except ValueError as error:
            raise ValueError(f"{self._place}: {error}") from error
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class TextFile(InputFile):
    """A file that is one document."""

    def read(self, start: int) -> Iterator[str | None]:
        """Yields the file's text, once."""
        if start:
            return
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{self.path}: a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
                )
        try:
            text = [data.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            cure = "fetch it again if it was cut off there, or " * error.reason.startswith("unexp")
            cure += "convert the file, or leave it out"
            raise ValueError(f"{self.path}: byte {error.start} is not UTF-8: {cure}") from None
        data.clear()  # it may be long
        yield text.pop()


def long_text(data: bytes) -> str | LongText:
    """Decodes UTF-8, a long text to `LongText`; refuses other bytes."""
    if len(data) < LONG_BYTES:
        return data.decode()
    for _ in codecs.iterdecode(iter(partial(io.BytesIO(data).read, 1 << 20), b""), "utf-8"):
        pass  # read in pieces that are not kept
    return LongText(data)


def whole_characters(text: str) -> str:
    """Returns a text with U+FFFD for half surrogate pairs, valid in JSON but not in UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _parse(line: bytes) -> Any:
    """Parses a line of JSON, with its long texts as `LongText`.

    json decodes the line and then copies the texts from it, both at four bytes a character if there
    is an emoji. A long line is therefore passed as Latin-1: one character for each byte of UTF-8.
    """
    if len(line) < LONG_BYTES or (line.isascii() and b"\\u" not in line):
        return json.loads(line)
    # with UTF-8 in place of the escapes of non-ASCII characters
    data, end = bytearray(), len(codecs.BOM_UTF8) * line.startswith(codecs.BOM_UTF8)
    for escapes in _ESCAPES.finditer(line):
        if escapes[0][1:2] != b"u":
            continue
        data += line[end : escapes.start()]
        end = escapes.end()
        text = whole_characters(json.loads(b'"%b"' % escapes[0]))
        data += json.dumps(text, ensure_ascii=False)[1:-1].encode()
    data += line[end:]
    read = data.decode("latin-1")
    data.clear()  # it may be long
    return json.loads(read, object_pairs_hook=_texts)


def _texts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object from keys and values with one character for each byte of UTF-8."""
    return {
        name.encode("latin-1").decode(): (
            long_text(value.encode("latin-1")) if isinstance(value, str) else value
        )
        for name, value in pairs
    }


class JsonLines(InputFile):
    """A JSON Lines file: one object with a text field per line."""

    def read(self, start: int) -> Iterator[str | LongText | None]:
        """Yields the text of every line; blank lines count as filtered."""
        number = 0
        for line in self._lines():  # enumerate would keep a long one
            number += 1
            if number <= start:
                continue
            if not line.strip():
                yield None
                continue
            where = f"{self.path}:{number}"
            try:
                record = _parse(line)
            except UnicodeDecodeError:
                raise ValueError(f"{where}: it is not UTF-8: convert the file") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not a line of JSON ({error}): {_ONE_LINE}") from None
            if isinstance(record, list):
                raise ValueError(
                    f"{where}: expected an object with fields, not a list: {_ONE_LINE}"
                )
            text = self._extract(record, where)
            del line, record
            yield text
            del text

    def _lines(self) -> Iterator[bytes]:
        """Splits at line feeds only: other line breaks may occur inside a JSON string."""
        pieces: list[bytes] = []  # the pieces of an unfinished line
        size = 0
        for chunk in self.chunks():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                line = b"".join([*pieces, end]) if size else end
                pieces, size = [], 0
                yield line
                del line  # it may be long
            pieces.append(rest)
            size += len(rest)
            if size > MAX_LINE_BYTES:
                raise ValueError(
                    f"{self.path}: a line of more than {MAX_LINE_BYTES >> 20} MiB: split its text"
                )
        if size:
            yield b"".join(pieces)


def file_reader(kind: type[InputFile], *keys: str) -> Callable[[SourceSpec], list[Input]]:
    """Returns the reader of one kind of file, whose sources may have these further keys."""

    def read(spec: SourceSpec) -> list[Input]:
        return [kind(file, name, spec) for file, name in matching_files(spec)]

    return takes("files", "max_bytes", *keys)(read)


read_text = file_reader(TextFile)
read_jsonl = file_reader(JsonLines, "text_field", "filter")
