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
    unpack = {".gz": _gunzip, ".zst": _unzstd}.get(path.suffix, _plain)
    with path.open("rb") as handle:
        try:
            for chunk in unpack(handle):
                counter.bytes = handle.tell()
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile, _Broken) as error:
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


class _Broken(Exception):
    """Compressed data that cannot be decompressed."""


def _plain(handle: BinaryIO) -> Iterator[bytes]:
    while chunk := handle.read(1 << 20):
        yield chunk


def _gunzip(handle: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=handle) as stream:
        while chunk := stream.read(1 << 20):
            yield chunk


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
                raise _Broken(str(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("it ends inside a frame")


def split_lines(path: Path, counter: Counter, *, limit: int) -> Iterator[bytes]:
    """Splits a file at line feeds only: other line breaks may occur inside a JSON string.

    Raises:
        ValueError: A line is longer than `limit` bytes.
    """
    held: list[bytes] = []
    size = 0
    for chunk in read_chunks(path, counter):
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*held, line]) if held else line
            held, size = [], 0
        if rest:
            held.append(rest)
            size += len(rest)
        if size > limit:
            raise ValueError(f"{path}: a line of more than {limit >> 20} MiB: split the document")
    if held:
        yield b"".join(held)
