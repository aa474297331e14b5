"""Writing reference losses: one append-only log per rank, compacted when every block is there.

Reference models never change, so each block is scored once (paper, Appendix A, "Reference-loss
caching"). A rank appends to `rank-00000.log` (a record log, `record_log.py`), little-endian:

    block id u64 | 8 partial sums f32 | first 8 bytes of the block hash u64 | crc32 u32

`compact` turns the logs into arrays that are dense by block id (`reference_folder.py`). Ranks may
come and go, die and overlap: what counts is that every block is there and that copies agree to the
bit.

Shape suffixes: C = blocks, N = records.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.record_log import RecordLog, move_whole, told, write_whole
from nemo_rod.selection.reference_folder import (
    NUM_CHUNKS,
    RECORD,
    ROWS,
    SCHEMA,
    ReferenceManifest,
    hash_heads,
    manifest_digest,
    record_bytes,
    record_checks,
)

LOG_MAGIC = b"RODREF01"

Hashes = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.uint8]]


class ReferenceWriter:
    """Appends the partial sums of scored blocks to the log of one rank.

    Attributes:
        done: Block ids that this rank's log holds, int64, ascending; see also `logged_ids`.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        *,
        manifest: ReferenceManifest,
        sync_every: int = 4096,
    ) -> None:
        """Begin the log of a rank, or go on with it from its last whole record.

        Args:
            folder: Folder of the references.
            rank: Number of this writer; each has a log of its own.
            manifest: What the losses are computed with.
            sync_every: Wait for the disk after so many records.

        Raises:
            ValueError: The log was written with something else; the field is named.
        """
        path = Path(folder) / f"rank-{rank:05d}.log"
        if not path.exists():
            RecordLog.create(path, LOG_MAGIC, asdict(manifest), RECORD.itemsize + 4)
        self.manifest = manifest
        self._log = _open(path, manifest, read_only=False)
        valid_N = self._log.recover()
        ids = self._log.payload().view(RECORD)["id"].reshape(-1)[valid_N]
        self.done: npt.NDArray[np.int64] = np.unique(ids.astype(np.int64))
        self._sync_every = sync_every
        self._unsynced = 0

    def append(
        self, block_ids: npt.ArrayLike, sums_C8: npt.ArrayLike, hashes: npt.NDArray[np.uint8]
    ) -> None:
        """Add scored blocks.

        Args:
            block_ids: int64 [C].
            sums_C8: Partial sums of the token losses, nats, float32 [C, 8]; chunk c holds the
                targets with index in [c*S/8, (c+1)*S/8) of the S-1 next-token targets.
            hashes: Block hashes, uint8 [C, 16].

        Raises:
            ValueError: A sum that is not finite, or a block id outside the manifest's range.
            OSError: The disk is full, or the like; the log is as before.
        """
        block_ids = np.asarray(block_ids, dtype=np.int64)
        records_C = np.zeros(block_ids.shape, dtype=RECORD)
        records_C["id"], records_C["sums"] = block_ids, sums_C8
        records_C["head"] = hash_heads(hashes)
        _check_sums(records_C, "the scoring pass")
        _check_range(records_C, self.manifest, str(self._log.path))
        self._unsynced += len(records_C)
        sync = self._unsynced >= self._sync_every
        self._log.append(record_bytes(records_C), sync=sync)
        self._unsynced = 0 if sync else self._unsynced

    def close(self) -> None:
        """Wait for the disk and close the log."""
        self._log.sync()
        self._log.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the log."""
        self.close()


def logged_ids(folder: str | Path, manifest: ReferenceManifest) -> npt.NDArray[np.int64]:
    """Return the block ids that the logs of all ranks hold, int64, ascending, each once.

    Raises:
        ValueError: A log was written with something else than `manifest`.
    """
    ids = [np.empty(0, dtype=np.int64)]
    for path in _log_paths(folder):
        log = _open(path, manifest, read_only=True)
        ids += [part["id"].astype(np.int64) for part in _valid_records(log)]
        log.close()
    return np.unique(np.concatenate(ids))


def compact(folder: str | Path, *, manifest: ReferenceManifest, hashes: Hashes) -> None:
    """Turn the logs of all ranks into dense arrays, and remove the logs.

    Args:
        folder: Folder of the references.
        manifest: What the losses were computed with, and the range of blocks that must be there.
        hashes: Gives the block hashes uint8 [C, 16] of block ids int64 [C], such as `store.hashes`.

    Raises:
        ValueError: The folder is complete; or a block is missing, has two different losses, a NaN,
            or another hash than the store's. The logs stay as they are.
    """
    folder = Path(folder)
    if (folder / "manifest.json").exists():
        raise ValueError(f"{folder} is complete already: use it, or remove it to score again")
    work = folder / ".compact.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    logs = _log_paths(folder)
    try:
        arrays = _new_arrays(work, manifest.stop - manifest.start)
        _fill(arrays, logs, manifest, hashes, folder)
        _finish(folder, work, arrays, manifest)
    except (ValueError, OSError):  # room that was taken for nothing is given back
        shutil.rmtree(work, ignore_errors=True)
        raise
    remove_logs(folder)


def remove_logs(folder: str | Path) -> None:
    """Remove what a complete folder does not need: the logs, and what killed writers left behind.

    A run that was killed between completing the folder and this has left them there.
    """
    folder = Path(folder)
    assert (folder / "manifest.json").exists(), f"{folder} still needs its logs"
    shutil.rmtree(folder / ".compact.tmp", ignore_errors=True)
    for path in [*_log_paths(folder), *folder.glob(".*.tmp")]:
        path.unlink()


def _new_arrays(work: Path, size: int) -> dict[str, np.memmap]:
    """Make the dense arrays, with room on the disk for all of them."""
    shapes: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
        "sums": (np.float32, (size, NUM_CHUNKS)),
        "hash": (np.uint64, (size,)),
        "check": (np.uint32, (size,)),
    }
    arrays = {}
    for name, (dtype, shape) in shapes.items():
        path = work / f"{name}.npy"
        try:
            arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
            # A map that finds the disk full when it is written to ends the process by a signal.
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise told(error, path) from error
    return arrays


def _fill(
    arrays: dict[str, np.memmap],
    logs: list[Path],
    manifest: ReferenceManifest,
    hashes: Hashes,
    folder: Path,
) -> None:
    """Enter the records of all logs into the arrays, and refuse what must not be there."""
    seen = np.zeros(manifest.stop - manifest.start, dtype=bool)
    for path in logs:
        log = _open(path, manifest, read_only=True)
        for records_N in _valid_records(log):
            _check_range(records_N, manifest, str(path))
            _check_sums(records_N, str(path))
            _check_hashes(records_N, hashes, path)
            _merge(records_N, arrays, seen, manifest.start, path)
        log.close()
    _check_coverage(seen, manifest.start, folder, len(logs))


def _finish(
    folder: Path, work: Path, arrays: dict[str, np.memmap], manifest: ReferenceManifest
) -> None:
    """Move the arrays into place, and the manifest that makes them count last."""
    digest = manifest_digest(manifest, arrays["sums"], arrays["hash"])
    for name, array in arrays.items():
        array.flush()
        move_whole(work / f"{name}.npy", folder / f"{name}.npy")
    content = {"schema": SCHEMA, **asdict(manifest), "digest": digest}
    write_whole(folder / "manifest.json", json.dumps(content, indent=2).encode() + b"\n")


def _merge(
    records_N: npt.NDArray[np.void],
    arrays: dict[str, np.memmap],
    seen: npt.NDArray[np.bool_],
    start: int,
    path: Path,
) -> None:
    """Enter records into the dense arrays; refuse a second loss for a block that differs."""
    row_N = records_N["id"].astype(np.int64) - start
    rows, first = np.unique(row_N, return_index=True)
    first = first[~seen[rows]]
    new = row_N[first]
    arrays["sums"][new] = records_N["sums"][first]
    arrays["hash"][new] = records_N["head"][first]
    arrays["check"][new] = record_checks(records_N[first])
    seen[new] = True
    same_N = (arrays["sums"][row_N] == records_N["sums"]).all(axis=1)
    if not same_N.all():
        block_id = start + int(row_N[np.argmin(same_N)])
        raise ValueError(
            f"{path} holds another loss for block {block_id} than was read before: the logs are of "
            "two scoring passes that differ; remove them and score again"
        )


def _check_coverage(seen: npt.NDArray[np.bool_], start: int, folder: Path, num_logs: int) -> None:
    missing = np.flatnonzero(~seen)
    if missing.size:
        raise ValueError(
            f"{folder} has no valid loss of {missing.size} of {len(seen)} blocks in its {num_logs} "
            f"logs, the first is block {start + missing[0]}: score again, which fills in what is "
            "missing"
        )


def _check_sums(records_N: npt.NDArray[np.void], where: str) -> None:
    finite_N = np.isfinite(records_N["sums"]).all(axis=1)
    if not finite_N.all():
        raise ValueError(
            f"{where} has losses that are not finite for {(~finite_N).sum()} blocks, the first is "
            f"block {records_N['id'][np.argmin(finite_N)]}: check the reference model and its "
            "precision"
        )


def _check_range(records_N: npt.NDArray[np.void], manifest: ReferenceManifest, where: str) -> None:
    inside_N = (records_N["id"] >= manifest.start) & (records_N["id"] < manifest.stop)
    if not inside_N.all():
        raise ValueError(
            f"{where} has a loss for block {records_N['id'][np.argmin(inside_N)]}, but the "
            f"manifest is of blocks [{manifest.start}, {manifest.stop}): score the range that the "
            "manifest names"
        )


def _check_hashes(records_N: npt.NDArray[np.void], hashes: Hashes, path: Path) -> None:
    ids = records_N["id"].astype(np.int64)
    same_N = hash_heads(hashes(ids)) == records_N["head"]
    if not same_N.all():
        raise ValueError(
            f"{path} scored block {ids[np.argmin(same_N)]} with another content than the block "
            "store holds: the store was rebuilt; remove the logs and score again"
        )


def _log_paths(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob("rank-*.log"))


def _open(path: Path, manifest: ReferenceManifest, *, read_only: bool) -> RecordLog:
    """Open a log, which must have been written with `manifest`."""
    log = RecordLog(path, LOG_MAGIC, read_only=read_only)
    found = ReferenceManifest(**log.header)
    if found != manifest:
        raise ValueError(
            f"{path} was written with {found.difference(manifest)}: finish it with what it was "
            "begun with, or remove it to score again"
        )
    return log


def _valid_records(log: RecordLog) -> Iterator[npt.NDArray[np.void]]:
    """Give the valid records of a log opened for reading, some at a time."""
    valid_N = log.recover()
    records_N = log.payload().view(RECORD).reshape(-1)
    for first in range(0, len(records_N), ROWS):
        yield np.array(records_N[first : first + ROWS][valid_N[first : first + ROWS]])
