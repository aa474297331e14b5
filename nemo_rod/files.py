"""Files that are complete or absent, even after a power cut, their readers, and digests."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_CURE = "restore it from a copy, or run its stage again"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# of a file of values; a folder of somebody else may hold any number
MOST_BYTES, _MOST_OBJECTS, _MOST_LINES = 1 << 25, 1 << 20, 1 << 21


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


def write_json(path: Path, value: object, *, below: Path | None = None) -> None:
    """Writes a JSON file atomically; see `replacing`."""
    write_whole(path, f"{json.dumps(value, indent=1, ensure_ascii=False)}\n".encode(), below=below)


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Reads a file that holds one JSON object with at least these keys.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    data = read_bytes(path)
    if data.count(b"{") + data.count(b"[") > _MOST_OBJECTS:
        raise ValueError(f"{path} has more than {_MOST_OBJECTS:,} objects: {_CURE}")
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged (not valid JSON: {error}): {_CURE}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: check that nemo-rod wrote it")
    expect_keys(path, value, keys)
    return value


def by_launch(run_dir: Path, name: str) -> list[Path]:
    """Returns a file of each launch of a run folder, the latest last: a clock may be set back."""
    files = run_dir.glob(f"launch/*/{name}")
    return sorted(files, key=lambda file: (launch_number(file), file.lstat().st_mtime))


def launch_number(file: Path) -> int:
    """Returns the number of the launch that a file is of; 0: one of a version without them."""
    number = file.with_name("number")
    text = read_bytes(number, 18) if number.exists() else b""
    return int(text) if text.isdigit() else 0


@contextmanager
def interpreting(
    path: Path, *, cure: str = _CURE, besides: tuple[type[Exception], ...] = ()
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
        is_systems = isinstance(error, OSError) and error.errno is not None  # Arrow's have none
        if is_systems or isinstance(error, (MemoryError, *besides)):
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
    """Returns the values of nested objects by their dotted keys; lists are values, and `{}` is."""
    values: dict[str, Any] = {}
    for key, item in value.items():
        is_nested = isinstance(item, dict) and item
        values |= flat(item, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": item}
    return values


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Reads a file with one JSON object with these keys per line; ignores an incomplete last line.

    Raises:
        ValueError: another line is damaged or lacks a key; the message names the file.
    """
    return list(each_line(path, *keys))


def each_line(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Yields what `read_lines` returns, one line in memory at a time."""
    cure = "restore it from a copy, or remove the line"
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), start=1):
            if not line.endswith(b"\n"):
                if len(line) == MOST_BYTES:  # too long to be read
                    raise ValueError(f"{path} has no end of line {number}: {cure}")
                break
            if number > _MOST_LINES:
                raise ValueError(f"{path} has more than {_MOST_LINES} lines: {cure}")
            try:
                row = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} has no JSON in line {number} ({error}): {cure}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} has no JSON object in line {number}: {cure}")
            expect_keys(path, row, keys)
            yield row


def read_bytes(path: Path, most: int = MOST_BYTES, *, below: Path | None = None) -> bytes:
    """Returns the content of a regular file of at most `most` bytes; `below` as for `replacing`.

    Raises:
        ValueError: it has more, or is none.
    """
    with open_file(path, below=below) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path} has {size:,} bytes, unlike any of its kind: {_CURE}")
        return file.read()


def open_file(path: Path, flags: int = os.O_RDONLY, *, below: Path | None = None) -> IO[bytes]:
    """Opens a regular file; a pipe, which would wait for ever, is refused.

    Args:
        path: the file.
        flags: those of `os.open`. A file that is written is never a link.
        below: as for `replacing`; if `flags` make the file, its folder is made, too.

    Raises:
        ValueError: it is none, or a link.
    """
    flags |= os.O_NONBLOCK | (os.O_NOFOLLOW if below or flags & os.O_RDWR else 0)
    cure = "expected a file: remove it"
    try:
        if below is None:
            file = os.open(path, flags, 0o666)
        else:
            with folder_below(path.parent, below, make=bool(flags & os.O_CREAT)) as folder:
                file = os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(f"{path} is a link or a pipe, {cure}") from None
        error.filename = str(path)
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise ValueError(f"{path} is not a regular file, {cure}")
    mode = "rb" if not flags & os.O_RDWR else "ab+" if flags & os.O_APPEND else "r+b"
    return os.fdopen(file, mode)


def write_whole(path: Path, data: bytes, *, below: Path | None = None) -> None:
    """Writes a file atomically; see `replacing`."""
    with replacing(path, below=below) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, below: Path | None = None, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a new file that takes the place of `path` once the block has ended well.

    Its name is random until then, so nothing that is there already is written to.

    Args:
        path: the file; its folder is made if it is missing.
        below: folder below which no link is followed, such as that of a run; None follows any.
        mode: permissions, less those of the umask.

    Raises:
        ValueError: a folder below `below` is a link.
        OSError: the write failed; the message names the file and, where known, the remedy.
    """
    name = f".{path.name[:200]}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with writing(path), folder_below(path.parent, below) as folder:
        descriptor = os.open(name, flags, mode, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                lock(descriptor)  # until it is renamed: nobody takes it for a leftover
                yield file
                file.flush()
                os.fsync(descriptor)
                os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            _remove_leftovers(path.name, folder)
            os.fsync(folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise


def _remove_leftovers(name: str, folder: int) -> None:
    """Removes what killed writers of a file have left beside it; those at work hold a lock."""
    for other in os.listdir(folder):
        if not re.fullmatch(rf"\.{re.escape(name[:200])}\.[0-9a-f]{{16}}\.tmp", other):
            continue
        with suppress(OSError):
            descriptor = os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                if lock(descriptor):
                    os.unlink(other, dir_fd=folder)
            finally:
                os.close(descriptor)


@contextmanager
def folder_below(path: Path, below: Path | None = None, *, make: bool = True) -> Iterator[int]:
    """Opens a folder, by default made if it is missing; below `below`, no link is followed.

    Raises:
        ValueError: a folder below `below` is a link.
    """
    place = path if below is None else below
    if make:
        place.mkdir(parents=True, exist_ok=True)
    names = path.relative_to(place).parts
    folder = os.open(place, os.O_DIRECTORY)
    try:
        for name in names:
            place /= name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            try:
                inner = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise ValueError(
                    f"{place} is a link or a file, expected a folder: remove it"
                ) from None
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def refuse_links(folder: Path) -> None:
    """Refuses links in a folder in which unfinished work goes on, which would lead it elsewhere.

    Raises:
        ValueError: there is a link.
    """
    if link := next((path for path in [folder, *folder.rglob("*")] if path.is_symlink()), None):
        raise ValueError(f"{link} is a link, which unfinished work would follow: remove it")


def remove(path: Path, *, below: Path) -> None:
    """Removes a file, or a folder with all that is in it; a link below `below` is not followed."""
    with suppress(FileNotFoundError), folder_below(path.parent, below, make=False) as folder:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)


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
    number = error.errno or errno.ENOSPC  # NumPy only says how much of an array it wrote
    advice = ": make room and run it again, it resumes where it stopped"
    reason = f"{os.strerror(number)}{advice if number in FULL else ''}"
    return OSError(number, reason, str(path))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raises the errors of a block that writes a file as `with_advice` returns them."""
    try:
        yield
    except OSError as error:
        raise with_advice(error, path) from error


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
    with open_file(path) as stream:
        while part := stream.read(1 << 24):
            yield part
