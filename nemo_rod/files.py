"""Files that are complete or absent, even after a power cut, their readers, and digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CURE = "restore it from a copy, or run its stage again"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_name(kind: str, name: str) -> None:
    """Refuses a name that is not usable unquoted as a folder and in a shell command.

    Raises:
        ValueError: the name has other characters, or more than 120.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{,119}", name):
        raise ValueError(
            f"{kind} name {name!r} must consist of letters, digits, '.', '_' and '-', not begin "
            "with '.' or '-' and have at most 120: it names a folder"
        )


def share(files: Iterable[Path]) -> None:
    """Gives files the permissions that new files have under the umask.

    Safetensors creates files that only their owner may read, and a group may share a run folder.
    """
    os.umask(mask := os.umask(0o077))
    for file in files:
        if not file.is_symlink():
            file.chmod(0o666 & ~mask)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file atomically; see `write_whole`."""
    write_whole(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Reads a file that holds one JSON object with at least these keys.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged (not valid JSON: {error}): {_CURE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: check that nemo-rod wrote it")
    expect_keys(path, value, keys)
    return value


@contextmanager
def interpreting(
    path: Path,
    *,
    cure: str = _CURE,
    besides: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Re-raises any error in the block as one ValueError that names the file.

    Files of another program or version may have unforeseen keys and values. System errors, and
    ValueErrors that name the file or its folder already, pass unchanged.

    Args:
        path: the file, or the folder of the files, that the block interprets.
        cure: the remedy in the message.
        besides: further errors that pass unchanged.

    Raises:
        ValueError: the block failed on the content of the file.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, MemoryError, *besides)):
            raise
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} is damaged ({kind}{message}): {cure}") from error


def expect_keys(path: Path, value: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuses an object of a file that lacks a key.

    Raises:
        ValueError: a key is missing; the message names it and the file.
    """
    for key in keys:
        if key not in value:
            raise ValueError(f"{path} lacks the key {key!r}, found {sorted(value)}: {_CURE}")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested objects by their dotted keys; lists are values."""
    values: dict[str, Any] = {}
    for key, item in value.items():
        values |= flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return values


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Reads a file with one JSON object with these keys per line; ignores an incomplete last line.

    Raises:
        ValueError: another line is damaged or lacks a key; the message names the file.
    """
    rows, cure = [], "restore it from a copy, or remove the line"
    *lines, _ = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} has no JSON in line {number} ({error}): {cure}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} has no JSON object in line {number}: {cure}")
        expect_keys(path, row, keys)
        rows.append(row)
    return rows


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: the write failed; the message names the file and, where known, the remedy.
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


def lock(file: int) -> bool:
    """Takes the lock of an open file if it is free, until the file is closed.

    On file systems without locks, such as Lustre without its flock option, it is always free.

    Returns:
        Whether this process now holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    return True


def with_advice(error: OSError, path: Path) -> OSError:
    """Returns the error with the file's name and, where known, the remedy.

    Earlier output is complete after any error: a repeated run resumes from it.
    """
    advice = ": make room and run it again, it resumes where it stopped"
    reason = f"{error.strerror}{advice if error.errno in FULL else ''}"
    return OSError(error.errno, reason, str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds a file's name, and the remedy, to errors of the system in the block that name none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise with_advice(error, path) from error


def read_ahead(paths: Iterable[Path], on_read: Callable[[str], object] = lambda note: None) -> int:
    """Reads whole files in order into the page cache, before they are read at random.

    A shared file system serves a file in order a thousand times faster than by pages of 4 kB.

    Args:
        paths: the files.
        on_read: called with a description of the next read, and with "" at the end.

    Returns:
        Bytes read.
    """
    total = 0
    for path in paths:
        on_read(f"reads {path}")
        total += sum(map(len, _parts(path)))
    on_read("")
    return total


def digest(data: bytes) -> str:
    """Returns a content digest: 16 bytes of blake2b, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_files(paths: list[Path]) -> str:
    """Returns the digest of the files' concatenated contents."""
    state = hashlib.blake2b(digest_size=16)
    for path in paths:
        for part in _parts(path):
            state.update(part)
    return state.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while part := stream.read(1 << 24):
            yield part
