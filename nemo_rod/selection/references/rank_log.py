"""Logs of reference losses, one per rank, and their compaction to arrays dense by block id.

Reference models never change, so each block is scored once (paper, Appendix A, "Reference-loss
caching"). A rank appends to `rank-00000.log` (a record log, `record_log.py`), little-endian:

    block id u64 | loss over every length f32 | first 8 bytes of the block hash u64 | crc32 u32

Ranks may join, leave, die and overlap: `compact` needs every block once at least, and bitwise equal
copies. Its folder is valid only once `manifest.json` exists; until then the logs stay.

Shape suffixes: C = blocks, N = records.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nemo_rod.files import move_whole, with_advice, write_whole
from nemo_rod.selection.arrays import Bytes, Ids, Mask, Records
from nemo_rod.selection.curriculum.record_log import RecordLog
from nemo_rod.selection.references.folder import (
    ROWS,
    SCHEMA,
    ReferenceManifest,
    array_types,
    hash_heads,
    manifest_digest,
    read_manifest,
    record_checks,
    record_type,
    row_bytes,
)

LOG_MAGIC = b"RODREF01"


class ReferenceWriter:
    """Appends the losses of scored blocks to the log of one rank, begun or resumed.

    Args:
        folder: Folder of the references.
        rank: Number of this writer; each has its own log.
        manifest: Provenance of the losses; a log with another one is refused.
        sync_every: Number of records between two waits for the disk.

    Attributes:
        done: Block ids in this rank's log, int64, ascending; see also `logged_ids`.
    """

    def __init__(
        self, folder: str | Path, rank: int, *, manifest: ReferenceManifest, sync_every: int = 4096
    ) -> None:
        path = Path(folder) / f"rank-{rank:05d}.log"
        if not path.exists():
            RecordLog.create(path, LOG_MAGIC, asdict(manifest), _record_size(manifest))
        self.manifest, self._sync_every, self._unsynced = manifest, sync_every, 0
        self._log, _ = open_log(path, expect=manifest, read_only=False)
        records_N, valid_N = recovered(self._log, manifest)
        self.done: Ids = np.unique(records_N["id"][valid_N].astype(np.int64))

    def append(self, block_ids: npt.ArrayLike, losses_CL: npt.ArrayLike, hashes: Bytes) -> None:
        """Adds scored blocks.

        Args:
            block_ids: int64 [C].
            losses_CL: Losses over the manifest's lengths, nats per token, float32 [C, L].
            hashes: Block hashes, uint8 [C, 16].

        Raises:
            ValueError: A loss that is not finite, or a block id outside the manifest's range.
            OSError: The write failed, e.g. on a full disk; the log is unchanged.
        """
        block_ids = np.asarray(block_ids, dtype=np.int64)
        records_C = np.zeros(block_ids.shape, dtype=record_type(self.manifest.lengths))
        records_C["id"], records_C["loss"] = block_ids, losses_CL
        records_C["head"] = hash_heads(hashes)
        check_losses(records_C, "the scoring pass")
        _check_range(records_C, self.manifest, self._log.path)
        self._unsynced += len(records_C)
        sync = self._unsynced >= self._sync_every
        self._log.append(row_bytes(records_C), sync=sync)
        self._unsynced = 0 if sync else self._unsynced

    def close(self) -> None:
        """Syncs the log to disk and closes it."""
        self._log.sync()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def logged_ids(folder: str | Path, manifest: ReferenceManifest) -> Ids:
    """Returns the unique block ids in the logs of all ranks, int64, ascending.

    Raises:
        ValueError: A log was not written with `manifest`.
    """
    ids = [np.empty(0, dtype=np.int64)]
    for path in log_paths(folder):
        ids += [part["id"].astype(np.int64) for part in _valid_records(path, manifest)]
    return np.unique(np.concatenate(ids))


def compact(
    folder: str | Path, *, manifest: ReferenceManifest, hashes: Callable[[Ids], Bytes]
) -> None:
    """Turns the logs of all ranks into dense arrays and removes the logs.

    Args:
        folder: Folder of the references.
        manifest: Provenance of the losses, and the range of blocks that must be present.
        hashes: Returns the hashes uint8 [C, 16] of block ids int64 [C], such as `store.hashes`.

    Raises:
        ValueError: The folder is already complete; or a block is missing, has two different losses
            or a NaN, or its hash differs from the store's. The logs stay unchanged.
    """
    folder = Path(folder)
    if (folder / "manifest.json").exists():
        raise ValueError(f"{folder} is complete already: use it, or remove it to compute it again")
    work, logs = folder / ".compact.tmp", log_paths(folder)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        arrays = _new_arrays(work, manifest)
        present = np.zeros(manifest.num_blocks, dtype=bool)
        for path in logs:
            for records_N in _valid_records(path, manifest):
                _check_range(records_N, manifest, path)
                check_losses(records_N, str(path))
                ids = records_N["id"].astype(np.int64)
                same_N = hash_heads(hashes(ids)) == records_N["head"]
                if not same_N.all():
                    raise ValueError(
                        f"{path} scored block {ids[np.argmin(same_N)]} with another content than "
                        "the block store holds: the store was rebuilt; remove the logs and score "
                        "again"
                    )
                _merge(records_N, arrays, present, manifest.start, path)
        missing = np.flatnonzero(~present)
        if missing.size:
            raise ValueError(
                f"{folder} has no valid loss of {missing.size} of {len(present)} blocks in its "
                f"{len(logs)} logs, the first is block {manifest.start + missing[0]}: score again, "
                "which scores only the missing blocks"
            )
        digest = manifest_digest(manifest, arrays["loss"], arrays["hash"])
        for name, array in arrays.items():
            array.flush()
            move_whole(work / f"{name}.npy", folder / f"{name}.npy")
        content = {"schema": SCHEMA, **asdict(manifest), "digest": digest}
        write_whole(folder / "manifest.json", json.dumps(content, indent=2).encode() + b"\n")
    except (ValueError, OSError):  # free the allocated disk space
        shutil.rmtree(work, ignore_errors=True)
        raise
    remove_logs(folder)


def remove_logs(folder: str | Path) -> None:
    """Removes the logs of a complete folder, and leftovers of killed writers."""
    folder = Path(folder)
    assert (folder / "manifest.json").exists(), f"{folder} still needs its logs"
    shutil.rmtree(folder / ".compact.tmp", ignore_errors=True)
    for path in [*log_paths(folder), *folder.glob(".*.tmp")]:
        path.unlink()


def log_paths(folder: str | Path) -> list[Path]:
    """Returns the logs of all ranks."""
    return sorted(Path(folder).glob("rank-*.log"))


def open_log(
    path: Path, *, expect: ReferenceManifest | None = None, read_only: bool = True
) -> tuple[RecordLog, ReferenceManifest]:
    """Opens a log, with the manifest in its header; refuses any but the expected one."""
    log = RecordLog(
        path,
        LOG_MAGIC,
        lambda header: _record_size(read_manifest(path, header)),
        read_only=read_only,
    )
    manifest = read_manifest(path, log.header)
    if expect is not None and manifest != expect:
        raise ValueError(
            f"{path} was written with {manifest.difference(expect)}: finish it with the same "
            "values, or remove it to compute it again"
        )
    return log, manifest


def recovered(log: RecordLog, manifest: ReferenceManifest) -> tuple[Records, Mask]:
    """Returns a log's records [N] up to the last valid one, and which are valid, bool [N]."""
    valid_N = log.recover()
    return log.payload().view(record_type(manifest.lengths)).reshape(-1), valid_N


def check_losses(records_N: Records, origin: str) -> None:
    """Refuses records with non-finite losses."""
    finite_N = np.isfinite(records_N["loss"]).all(axis=1)
    if not finite_N.all():
        raise ValueError(
            f"{origin} has losses that are not finite for {(~finite_N).sum()} blocks, the first is "
            f"block {records_N['id'][np.argmin(finite_N)]}: check the reference model and its "
            "precision"
        )


def _check_range(records_N: Records, manifest: ReferenceManifest, path: Path) -> None:
    inside_N = (records_N["id"] >= manifest.start) & (records_N["id"] < manifest.stop)
    if not inside_N.all():
        raise ValueError(
            f"{path} has a loss for block {records_N['id'][np.argmin(inside_N)]}, but the "
            f"manifest is of blocks [{manifest.start}, {manifest.stop}): score the range that the "
            "manifest names"
        )


def _valid_records(path: Path, manifest: ReferenceManifest) -> Iterator[Records]:
    """Yields the valid records of a log in batches."""
    log, _ = open_log(path, expect=manifest)
    records_N, valid_N = recovered(log, manifest)
    for first in range(0, len(records_N), ROWS):
        yield np.array(records_N[first : first + ROWS][valid_N[first : first + ROWS]])
    log.close()


def _record_size(manifest: ReferenceManifest) -> int:
    return record_type(manifest.lengths).itemsize + 4  # with the checksum


def _new_arrays(work: Path, manifest: ReferenceManifest) -> dict[str, np.memmap]:
    """Creates the dense arrays and allocates disk space for all of them."""
    arrays = {}
    for name, (dtype, shape) in array_types(manifest).items():
        path = work / f"{name}.npy"
        try:
            arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
            # Writing to a memory map on a full disk would kill the process with a signal.
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise with_advice(error, path) from error
    return arrays


def _merge(
    records_N: Records, arrays: dict[str, np.memmap], present: Mask, start: int, path: Path
) -> None:
    """Copies records into the dense arrays; refuses a second, different loss for a block."""
    row_N = records_N["id"].astype(np.int64) - start
    rows, first = np.unique(row_N, return_index=True)
    first = first[~present[rows]]
    new = row_N[first]
    arrays["loss"][new] = records_N["loss"][first]
    arrays["hash"][new] = records_N["head"][first]
    arrays["check"][new] = record_checks(records_N[first])
    present[new] = True
    same_N = (arrays["loss"][row_N] == records_N["loss"]).all(axis=1)
    if not same_N.all():
        block_id = start + int(row_N[np.argmin(same_N)])
        raise ValueError(
            f"{path} holds another loss for block {block_id} than was read before: the logs are of "
            "two scoring passes that differ; remove them and score again"
        )
