"""Streams the bytes of a file, compressed or not, and splits streams into lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class Counter:
    """Counts the bytes read of a file."""

    def __init__(self) -> None:
        self.bytes = 0


def read_chunks(path: Path, counter: Counter) -> Iterator[bytes]:
    """Yields a file's bytes, decompressed according to its suffix (.gz, .zst, or neither).

    Args:
        path: The file.
        counter: Set to the number of bytes read so far, compressed size.

    Raises:
        ValueError: The compressed data is corrupt or truncated.
    """
    with path.open("rb") as handle:
        try:
            if path.suffix == ".zst":
                chunks = _unzstd(handle)
            else:
                stream = gzip.GzipFile(fileobj=handle) if path.suffix == ".gz" else handle
                chunks = iter(lambda: stream.read(1 << 20), b"")
            for chunk in chunks:
                counter.bytes = handle.tell()
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path}: broken or cut off {path.suffix} data ({error}): fetch the file again"
            ) from error


def read_whole(path: Path, *, limit: int) -> bytes:
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


def _unzstd(handle: BinaryIO) -> Iterator[bytes]:
    # The library's own stream reader accepts a file that ends inside a frame as complete.
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame = None
    while chunk := handle.read(1 << 12):  # four bytes can stand for 128 KiB
        while chunk:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")


def split_lines(path: Path, counter: Counter, *, limit: int) -> Iterator[bytes]:
    """Splits a file at line feeds only: other line breaks may occur inside a JSON string.

    Raises:
        ValueError: A line is longer than `limit` bytes.
    """
    pieces: list[bytes] = []  # of an unfinished line
    size = 0
    for chunk in read_chunks(path, counter):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*pieces, end]) if pieces else end
            pieces, size = [], 0
        if rest:
            pieces.append(rest)
            size += len(rest)
        if size > limit:
            raise ValueError(f"{path}: a line of more than {limit >> 20} MiB: split the document")
    if pieces:
        yield b"".join(pieces)
