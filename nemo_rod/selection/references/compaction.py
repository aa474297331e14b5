"""Turns the logs of reference losses into arrays that are dense by block id.

Ranks may join, leave, die and overlap; all that matters is that every block is present and that
copies are bitwise equal. The folder is valid only once `manifest.json` exists; until then the logs
stay.

Shape suffixes: C = blocks, N = records.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from nemo_rod.files import move_whole, with_advice, write_whole
from nemo_rod.selection.arrays import Bytes, Ids, Mask, Records
from nemo_rod.selection.references.folder import (
    ARRAYS,
    SCHEMA,
    ReferenceManifest,
    hash_heads,
    manifest_digest,
    record_checks,
)
from nemo_rod.selection.references.rank_log import check_range, check_sums, log_paths, valid_records

Hashes = Callable[[Ids], Bytes]


def compact(folder: str | Path, *, manifest: ReferenceManifest, hashes: Hashes) -> None:
    """Turn the logs of all ranks into dense arrays and remove the logs.

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
    work = folder / ".compact.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    logs = log_paths(folder)
    try:
        arrays = _new_arrays(work, manifest.num_blocks)
        seen = np.zeros(manifest.num_blocks, dtype=bool)
        for path in logs:
            for records_N in valid_records(path, manifest):
                check_range(records_N, manifest, str(path))
                check_sums(records_N, str(path))
                _check_hashes(records_N, hashes, path)
                _merge(records_N, arrays, seen, manifest.start, path)
        _check_coverage(seen, manifest.start, folder, len(logs))
        _finish(folder, work, arrays, manifest)
    except (ValueError, OSError):  # free the allocated disk space
        shutil.rmtree(work, ignore_errors=True)
        raise
    remove_logs(folder)


def remove_logs(folder: str | Path) -> None:
    """Remove what a complete folder no longer needs: the logs, and leftovers of killed writers."""
    folder = Path(folder)
    assert (folder / "manifest.json").exists(), f"{folder} still needs its logs"
    shutil.rmtree(folder / ".compact.tmp", ignore_errors=True)
    for path in [*log_paths(folder), *folder.glob(".*.tmp")]:
        path.unlink()


def _new_arrays(work: Path, size: int) -> dict[str, np.memmap]:
    """Create the dense arrays and allocate disk space for all of them."""
    arrays = {}
    for name, (dtype, shape) in ARRAYS.items():
        path = work / f"{name}.npy"
        try:
            arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, (size, *shape))
            # Writing to a memory map on a full disk would kill the process with a signal.
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise with_advice(error, path) from error
    return arrays


def _finish(
    folder: Path, work: Path, arrays: dict[str, np.memmap], manifest: ReferenceManifest
) -> None:
    """Move the arrays into place, then the manifest, which makes the folder complete."""
    digest = manifest_digest(manifest, arrays["sums"], arrays["hash"])
    for name, array in arrays.items():
        array.flush()
        move_whole(work / f"{name}.npy", folder / f"{name}.npy")
    content = {"schema": SCHEMA, **asdict(manifest), "digest": digest}
    write_whole(folder / "manifest.json", json.dumps(content, indent=2).encode() + b"\n")


def _merge(
    records_N: Records,
    arrays: dict[str, np.memmap],
    seen: Mask,
    start: int,
    path: Path,
) -> None:
    """Copy records into the dense arrays; refuse a second, different loss for a block."""
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


def _check_coverage(seen: Mask, start: int, folder: Path, num_logs: int) -> None:
    missing = np.flatnonzero(~seen)
    if missing.size:
        raise ValueError(
            f"{folder} has no valid loss of {missing.size} of {len(seen)} blocks in its {num_logs} "
            f"logs, the first is block {start + missing[0]}: score again, which fills in what is "
            "missing"
        )


def _check_hashes(records_N: Records, hashes: Hashes, path: Path) -> None:
    ids = records_N["id"].astype(np.int64)
    same_N = hash_heads(hashes(ids)) == records_N["head"]
    if not same_N.all():
        raise ValueError(
            f"{path} scored block {ids[np.argmin(same_N)]} with another content than the block "
            "store holds: the store was rebuilt; remove the logs and score again"
        )
