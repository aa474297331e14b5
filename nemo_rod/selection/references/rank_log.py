"""Records reference losses in one append-only log per rank.

Reference models never change, so each block is scored once (paper, Appendix A, "Reference-loss
caching"). A rank appends to `rank-00000.log` (a record log, `record_log.py`), little-endian:

    block id u64 | 8 partial sums f32 | first 8 bytes of the block hash u64 | crc32 u32

Once every block is recorded, `compaction.py` turns the logs into a complete folder.

Shape suffixes: C = blocks, N = records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Bytes, Ids, Mask, Records
from nemo_rod.selection.curriculum.record_log import RecordLog
from nemo_rod.selection.references.folder import (
    RECORD,
    ROWS,
    ReferenceManifest,
    hash_heads,
    read_manifest,
    row_bytes,
)

LOG_MAGIC = b"RODREF01"
_RECORD_SIZE = RECORD.itemsize + 4  # with the checksum


class ReferenceWriter:
    """Appends the partial sums of scored blocks to the log of one rank, begun or resumed.

    Args:
        folder: Folder of the references.
        rank: Number of this writer; each has its own log.
        manifest: Provenance of the losses.
        sync_every: Number of records between two waits for the disk.

    Raises:
        ValueError: The log has another manifest; the message names the fields that differ.

    Attributes:
        done: Block ids in this rank's log, int64, ascending; see also `logged_ids`.
    """

    def __init__(
        self, folder: str | Path, rank: int, *, manifest: ReferenceManifest, sync_every: int = 4096
    ) -> None:
        path = Path(folder) / f"rank-{rank:05d}.log"
        if not path.exists():
            RecordLog.create(path, LOG_MAGIC, asdict(manifest), _RECORD_SIZE)
        self.manifest = manifest
        self._log = _open_own(path, manifest, read_only=False)
        records_N, valid_N = recovered(self._log)
        self.done: Ids = np.unique(records_N["id"][valid_N].astype(np.int64))
        self._sync_every = sync_every
        self._unsynced = 0

    def append(self, block_ids: npt.ArrayLike, sums_C8: npt.ArrayLike, hashes: Bytes) -> None:
        """Add scored blocks.

        Args:
            block_ids: int64 [C].
            sums_C8: Partial sums of the token losses, nats, float32 [C, 8]; chunk c holds the
                targets with index in [c*S/8, (c+1)*S/8) of the S-1 next-token targets.
            hashes: Block hashes, uint8 [C, 16].

        Raises:
            ValueError: A sum that is not finite, or a block id outside the manifest's range.
            OSError: The write failed, e.g. on a full disk; the log is unchanged.
        """
        block_ids = np.asarray(block_ids, dtype=np.int64)
        records_C = np.zeros(block_ids.shape, dtype=RECORD)
        records_C["id"], records_C["sums"] = block_ids, sums_C8
        records_C["head"] = hash_heads(hashes)
        check_sums(records_C, "the scoring pass")
        check_range(records_C, self.manifest, str(self._log.path))
        self._unsynced += len(records_C)
        sync = self._unsynced >= self._sync_every
        self._log.append(row_bytes(records_C), sync=sync)
        self._unsynced = 0 if sync else self._unsynced

    def close(self) -> None:
        """Sync the log to disk and close it."""
        self._log.sync()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def logged_ids(folder: str | Path, manifest: ReferenceManifest) -> Ids:
    """Return the unique block ids in the logs of all ranks, int64, ascending.

    Raises:
        ValueError: A log was not written with `manifest`.
    """
    ids = [np.empty(0, dtype=np.int64)]
    for path in log_paths(folder):
        ids += [part["id"].astype(np.int64) for part in valid_records(path, manifest)]
    return np.unique(np.concatenate(ids))


def valid_records(path: Path, manifest: ReferenceManifest) -> Iterator[Records]:
    """Yield the valid records of a log in batches; refuse a log of another manifest."""
    log = _open_own(path, manifest, read_only=True)
    records_N, valid_N = recovered(log)
    for first in range(0, len(records_N), ROWS):
        yield np.array(records_N[first : first + ROWS][valid_N[first : first + ROWS]])
    log.close()


def log_paths(folder: str | Path) -> list[Path]:
    """Return the logs of all ranks."""
    return sorted(Path(folder).glob("rank-*.log"))


def check_range(records_N: Records, manifest: ReferenceManifest, where: str) -> None:
    """Refuse records of blocks outside the manifest's range."""
    inside_N = (records_N["id"] >= manifest.start) & (records_N["id"] < manifest.stop)
    if not inside_N.all():
        raise ValueError(
            f"{where} has a loss for block {records_N['id'][np.argmin(inside_N)]}, but the "
            f"manifest is of blocks [{manifest.start}, {manifest.stop}): score the range that the "
            "manifest names"
        )


def check_sums(records_N: Records, where: str) -> None:
    """Refuse records with non-finite losses."""
    finite_N = np.isfinite(records_N["sums"]).all(axis=1)
    if not finite_N.all():
        raise ValueError(
            f"{where} has losses that are not finite for {(~finite_N).sum()} blocks, the first is "
            f"block {records_N['id'][np.argmin(finite_N)]}: check the reference model and its "
            "precision"
        )


def open_log(path: Path, *, read_only: bool = True) -> tuple[RecordLog, ReferenceManifest]:
    """Open a log, with the manifest in its header."""
    log = RecordLog(path, LOG_MAGIC, lambda header: _RECORD_SIZE, read_only=read_only)
    return log, read_manifest(path, log.header)


def recovered(log: RecordLog) -> tuple[Records, Mask]:
    """Return a log's records [N] up to the last valid one, and which are valid, bool [N]."""
    valid_N = log.recover()
    return log.payload().view(RECORD).reshape(-1), valid_N


def _open_own(path: Path, manifest: ReferenceManifest, *, read_only: bool) -> RecordLog:
    """Open a log, which must have been written with `manifest`."""
    log, found = open_log(path, read_only=read_only)
    if found != manifest:
        raise ValueError(
            f"{path} was written with {found.difference(manifest)}: finish it with what it was "
            "begun with, or remove it to compute it again"
        )
    return log
