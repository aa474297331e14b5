"""An append-only file of fixed-size records that survives being killed at any byte.

    magic (8 bytes) | length of the JSON (u32) | JSON header | crc32 of all before (u32)
    record | record | ...                        each ends with the crc32 (u32) of its other bytes

Everything is little-endian. The header is written atomically. A record is valid only if its
checksum matches, so after a crash the file is truncated to its last valid record.

Shape suffixes: N = records, B = bytes of a record without its checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.files import interpreting, with_advice, write_whole
from nemo_rod.selection.arrays import Bytes, Mask

_CRC_BYTES = 4
_MOST_BYTES = 1 << 32  # of a record
_READ_BYTES = 1 << 24


class RecordLog:
    """A record log. Call `recover` before appending.

    Args:
        path: The file.
        magic: The first 8 bytes, which identify the kind of log.
        record_size: Checks the header, and returns the bytes of a record with its checksum; None
            trusts the file.
        read_only: Do not modify the file.

    Raises:
        ValueError: The file is missing or of another kind, or its header is damaged.

    Attributes:
        path: The file.
        header: The header's JSON object.
        count: Number of records in use, valid or not.
    """

    def __init__(
        self,
        path: Path,
        magic: bytes,
        record_size: Callable[[dict[str, Any]], int] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: check the path, or run the stage that writes it"
            )
        with open(path, "rb") as file:
            head = file.read(12)
            if head[:8] != magic:
                raise ValueError(
                    f"{path} begins with {head[:8]!r}, expected {magic!r}: it is another kind of "
                    "file, or was written by another version"
                )
            head += file.read(int.from_bytes(head[8:], "little"))
            crc = file.read(_CRC_BYTES)
        if zlib.crc32(head).to_bytes(_CRC_BYTES, "little") != crc:
            raise ValueError(
                f"{path} has a damaged header (checksum): restore the file from a copy"
            )
        self._start = len(head) + _CRC_BYTES
        with interpreting(path, cure="restore it from a copy"):
            content = json.loads(head[12:])
            self.header: dict[str, Any] = dict(content["header"])
            self._record_size: int = content["record_size"]
            expected = record_size(self.header) if record_size else self._record_size
            if self._record_size != expected or not _CRC_BYTES < expected < _MOST_BYTES:
                raise ValueError(f"its records have {self._record_size} bytes, not {expected}")
        self._read_only = read_only
        self._fd = os.open(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_APPEND)
        self.count = (os.fstat(self._fd).st_size - self._start) // self._record_size

    @staticmethod
    def create(path: Path, magic: bytes, header: dict[str, Any], record_size: int) -> None:
        """Writes a log without records; `record_size` includes the checksum.

        Raises:
            ValueError: The file exists.
        """
        assert len(magic) == 8, magic
        if path.exists():
            raise ValueError(f"{path} exists: open it to resume, or remove it to begin again")
        text = json.dumps({"record_size": record_size, "header": header}, sort_keys=True).encode()
        head = magic + len(text).to_bytes(4, "little") + text
        write_whole(path, head + zlib.crc32(head).to_bytes(_CRC_BYTES, "little"))

    def payload(self) -> Bytes:
        """Returns the records without checksums, as a read-only map of the file, uint8 [N, B]."""
        return self._records()[:, :-_CRC_BYTES]

    def recover(self) -> Mask:
        """Drops everything after the last valid record.

        A log opened for reading only ignores the rest but does not modify the file.

        Returns:
            Which of the remaining records are valid, bool [N].
        """
        records = self._records()
        valid_N = np.empty(self.count, dtype=bool)
        rows = max(1, _READ_BYTES // self._record_size)
        for first in range(0, self.count, rows):
            part = np.array(records[first : first + rows])
            stored_N = part[:, -_CRC_BYTES:].copy().view("<u4")[:, 0]
            valid_N[first : first + rows] = _crc32(part[:, :-_CRC_BYTES]) == stored_N
        whole = np.flatnonzero(valid_N)
        self.truncate(int(whole[-1]) + 1 if whole.size else 0)
        return valid_N[: self.count]

    def truncate(self, count: int) -> None:
        """Keeps only the first `count` records."""
        assert 0 <= count <= self.count, f"{count} of {self.count} records"
        self.count = count
        if not self._read_only and os.fstat(self._fd).st_size != self._end:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)

    def append(self, payload_NB: Bytes, *, sync: bool) -> None:
        """Appends records without their checksums; a partial write is rolled back.

        `sync` waits until they are on disk.

        Raises:
            ValueError: Another process has changed the file.
            OSError: The write failed, e.g. on a full disk.
        """
        assert not self._read_only, f"{self.path} was opened for reading only"
        assert payload_NB.shape[1] == self._record_size - _CRC_BYTES, payload_NB.shape
        size = os.fstat(self._fd).st_size
        if size != self._end:
            raise ValueError(
                f"{self.path} has {size} bytes where this process left {self._end}, so another one "
                "writes to it: run one job per folder"
            )
        crc_NB = _crc32(payload_NB).astype("<u4").view(np.uint8).reshape(-1, _CRC_BYTES)
        data = memoryview(np.concatenate([payload_NB, crc_NB], axis=1).tobytes())
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise with_advice(error, self.path) from error
        self.count += len(payload_NB)

    def sync(self) -> None:
        """Waits until everything appended is on disk; errors as of `append`."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise with_advice(error, self.path) from error

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _end(self) -> int:
        return self._start + self.count * self._record_size

    def _records(self) -> Bytes:
        shape = (self.count, self._record_size)
        if not self.count:
            return np.empty(shape, dtype=np.uint8)
        return np.memmap(self.path, np.uint8, mode="r", offset=self._start, shape=shape)


def _crc32(bytes_NB: Bytes) -> npt.NDArray[np.uint32]:
    rows = np.ascontiguousarray(bytes_NB)
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))
