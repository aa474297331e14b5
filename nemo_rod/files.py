"""Atomic, durable file writes (complete or absent, even after a power cut) and content digests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file atomically.

    Raises:
        OSError: naming the file and, where known, the remedy.
    """
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: naming the file and, where known, the remedy.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        move_whole(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise with_advice(error, path) from error


def move_whole(temporary: Path, path: Path) -> None:
    """Renames a finished file into place durably."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_advice(error: OSError, path: Path) -> OSError:
    """Returns the error with the file's name and, where known, the remedy.

    Earlier output is complete and safe whatever the error: a repeated run resumes from it.
    """
    advice = ": make room and run it again, it goes on where it stopped"
    reason = f"{error.strerror}{advice if error.errno in _FULL else ''}"
    return OSError(error.errno, reason, str(path))


def digest(data: bytes) -> str:
    """Returns a content digest: 16 bytes of blake2b, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_files(paths: list[Path]) -> str:
    """Returns the digest of the files' concatenated contents."""
    state = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as stream:
            while part := stream.read(1 << 24):
                state.update(part)
    return state.hexdigest()
