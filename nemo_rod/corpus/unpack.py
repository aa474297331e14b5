"""Streams the bytes of a file, compressed or not, and splits streams into lines."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any

from nemo_rod.corpus.input_files import File

_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LONGEST_WINDOW = 1 << 31  # of zstd --long=31; a frame takes no more than it asks for


_PACKED = (b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # how no text in UTF-8 begins
_NOT_DAMAGED = {  # in an error of zstd: what to do
    "ictionary": "it was compressed with a dictionary; decompress it with that, zstd -d -D FILE",
    "memory": "compress it again with a shorter window, without --long or --ultra",
}


class Counter:
    """Counts the bytes read of a file."""

    def __init__(self) -> None:
        self.bytes = 0


def read_chunks(path: File, counter: Counter) -> Iterator[bytes]:
    """Yields a file's bytes, decompressed according to its suffix (.gz, .bz2, .xz, .zst, or none).

    Args:
        path: The file.
        counter: Set to the number of bytes read so far, compressed size.

    Raises:
        ValueError: The compressed data is corrupt or truncated, or needs what is not here.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as handle:
        try:
            if suffix == ".zst":
                chunks = _unzstd(handle)
            else:
                stream = _OPEN[suffix](handle) if suffix in _OPEN else handle
                chunks = iter(lambda: stream.read(1 << 20), b"")
            for number, chunk in enumerate(chunks):
                if not number and suffix not in (".zst", *_OPEN) and chunk.startswith(_PACKED):
                    raise ValueError("it is compressed: let its name end in .gz, .xz or .zst")
                counter.bytes = handle.tell()
                yield chunk
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the system
                raise
            raise ValueError(
                f"{path}: broken or cut off {suffix} data ({error}): fetch the file again"
            ) from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def read_whole(path: File, *, limit: int) -> bytes:
    """Reads a file into memory, decompressed.

    Raises:
        ValueError: The compressed data is corrupt, or the content is larger than `limit` bytes.
    """
    chunks, size = [], 0
    for chunk in read_chunks(path, Counter()):
        size += len(chunk)
        if size > limit:
            raise ValueError(f"{path}: one document of more than {limit >> 20} MiB: split it")
        chunks.append(chunk)
    return b"".join(chunks)


def _unzstd(handle: IO[bytes]) -> Iterator[bytes]:
    # The library's own stream reader accepts a file that ends inside a frame as complete.
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW)
    frame = None
    while chunk := handle.read(1 << 12):  # four bytes can stand for 128 KiB
        while chunk:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                for sign, cure in _NOT_DAMAGED.items():
                    if sign in str(error):
                        raise ValueError(f"{error}: {cure}") from None
                raise EOFError(str(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")


def split_lines(path: File, counter: Counter, *, limit: int) -> Iterator[bytes]:
    """Splits a file at line feeds only: other line breaks may occur inside a JSON string.

    Raises:
        ValueError: A line is longer than `limit` bytes.
    """
    pieces: list[bytes] = []  # of an unfinished line
    size = 0
    for chunk in read_chunks(path, counter):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*pieces, end]) if pieces else end
            pieces, size = [], 0
            yield line
            del line  # it may be long
        if rest:
            pieces.append(rest)
            size += len(rest)
        if size > limit:
            raise ValueError(f"{path}: a line of more than {limit >> 20} MiB: split the document")
    if pieces:
        yield b"".join(pieces)
