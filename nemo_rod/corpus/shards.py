"""The files of one split of one source, written as a stream that can be interrupted and resumed.

    tokens-00000.bin   int32 little-endian [n, S], at most a million blocks per shard
    tokens-00000.idx   Megatron's index for it: every block is a sequence and a document
    tokens-00000.rows  instead of both, where blocks stay in the user's files: int64 [n], their rows
    hash.npy           uint8 [N, 16], the block hashes of all shards
    manifest.json      the contents and their provenance

Only whole blocks are appended, always at the end. Before a resumed run writes, it truncates the
files to the last count known to be safe, so they do not depend on interruptions.

Shape suffixes: S = tokens per block, N = blocks, n = blocks of a shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.files import sync, write_json

SCHEMA = 1
BLOCKS_PER_SHARD = 1_000_000
MOST_SHARDS = 100_000
HASH_BYTES = 16
HASH_HEADER_BYTES = 128
# Two stores are the same if these fields and the block hashes are.
_IDENTITY = ("schema", "source", "role", "split", "count", "block_size", "tokenizer", "eod_id")


def shard_sizes(count: int, per_shard: int) -> list[int]:
    """Returns the number of blocks in each shard of a split of `count` blocks.

    Raises:
        ValueError: there would be more shards than their names have numbers for.
    """
    if count > per_shard * MOST_SHARDS:
        raise ValueError(f"{count:,} blocks in shards of {per_shard:,} are too many files")
    return [min(per_shard, count - start) for start in range(0, count, per_shard)]


def shard_path(folder: Path, index: int, suffix: str) -> Path:
    """Returns the file of a shard; the suffix is ``bin``, ``idx`` or ``rows``."""
    return folder / f"tokens-{index:05d}.{suffix}"


def stored_as(manifest: Mapping[str, Any]) -> tuple[str, np.dtype[Any], int]:
    """Returns how shards store blocks: the suffix, and the type and number of a block's values."""
    if "in_place" in manifest:
        return "rows", np.dtype("<i8"), 1
    return "bin", np.dtype("<i4"), manifest["block_size"]


def token_reader(folder: Path, manifest: Mapping[str, Any]) -> Any:
    """Returns the function from rows as stored to tokens, int32 [n, S].

    Raises:
        ValueError: a file in which blocks stay is missing, or was changed since.
    """
    if "in_place" not in manifest:
        return np.asarray
    from nemo_rod.corpus.adapters.indexed_datasets import TokensInPlace

    return TokensInPlace(folder, manifest)


def index_bytes(num_blocks: int, block_size: int) -> bytes:
    """Returns the content of a Megatron ``.idx`` file for `num_blocks` sequences of int32 [S]."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, num_blocks, num_blocks + 1)
    lengths = np.full(num_blocks, block_size, dtype="<i4")
    pointers = np.arange(num_blocks, dtype="<i8") * (4 * block_size)
    documents = np.arange(num_blocks + 1, dtype="<i8")
    return header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def hash_header(count: int) -> bytes:
    """Returns the header of ``hash.npy``, of constant size so that it can be written last."""
    fields = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count}, {HASH_BYTES}), }}"
    text = fields.ljust(HASH_HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii")


def map_hashes(folder: Path, count: int) -> NDArray[np.uint8]:
    """Maps the hashes of a split of `count` blocks, uint8 [N, 16]."""
    shape = (count, HASH_BYTES)
    return np.memmap(folder / "hash.npy", np.uint8, "r", HASH_HEADER_BYTES, shape=shape)


def split_digest(manifest: Mapping[str, Any], folder: Path) -> str:
    """Returns the digest of a split's identity and block hashes: 16 bytes, in hex."""
    identity = {key: manifest[key] for key in _IDENTITY} | {"holdout": manifest["holdout"]}
    state = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
    with (folder / "hash.npy").open("rb") as handle:
        handle.seek(HASH_HEADER_BYTES)
        return hashlib.file_digest(handle, lambda: state).hexdigest()


class SplitWriter:
    """Appends blocks to the files of a split, after the `count` known to be safe.

    `manifest` has at least `block_size` and `blocks_per_shard`, perhaps also `in_place`.

    Raises:
        ValueError: the files hold fewer than `count` blocks.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], count: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, self._hashes = folder, count, folder / "hash.npy"
        self._manifest, self._per_shard = manifest, int(manifest["blocks_per_shard"])
        self._suffix, self._type, width = stored_as(manifest)
        self._unsynced: set[Path] = set()
        lengths = {
            shard_path(folder, index, self._suffix): self._type.itemsize * width * size
            for index, size in enumerate(shard_sizes(count, self._per_shard))
        }
        lengths[self._hashes] = HASH_HEADER_BYTES + HASH_BYTES * count
        for path in sorted(folder.iterdir()):
            if path.is_file() and path not in lengths:
                path.unlink()
        if not count:
            self._hashes.write_bytes(bytes(HASH_HEADER_BYTES))
        for path, length in lengths.items():
            if not path.exists() or path.stat().st_size < length:
                raise ValueError(
                    f"{path} is shorter than the {length} bytes that an earlier run wrote to it: "
                    "run prepare again, it makes this source from the beginning"
                )
            os.truncate(path, length)

    def append(self, stored: NDArray[Any], hashes: NDArray[np.uint8]) -> None:
        """Adds blocks, int32 [N, S] or their rows int64 [N, 1], and their hashes, uint8 [N, 16]."""
        stored = stored.astype(self._type, copy=False)
        while len(stored):
            shard, inside = divmod(self.count, self._per_shard)
            fit = self._per_shard - inside
            path = shard_path(self.folder, shard, self._suffix)
            for file, rows in ((path, stored[:fit]), (self._hashes, hashes[:fit])):
                self._unsynced.add(file)
                with file.open("ab") as handle:
                    handle.write(np.ascontiguousarray(rows).data)
            self.count += len(stored[:fit])
            stored, hashes = stored[fit:], hashes[fit:]

    def sync(self) -> None:
        """Waits until everything appended is on disk."""
        while self._unsynced:
            sync(self._unsynced.pop())
        sync(self.folder)

    def finish(self, more: Mapping[str, Any]) -> None:
        """Writes the indices and the manifest, with `more` in it, its counts and its digest."""
        self.sync()
        with self._hashes.open("r+b") as handle:
            handle.write(hash_header(self.count))
        sync(self._hashes)
        for index, size in enumerate(shard_sizes(self.count, self._per_shard)):
            if self._suffix == "bin":
                path = shard_path(self.folder, index, "idx")
                path.write_bytes(index_bytes(size, self._manifest["block_size"]))
                sync(path)
        manifest = {**self._manifest, **more, "count": self.count}
        manifest["digest"] = split_digest(manifest, self.folder)
        write_json(self.folder / "manifest.json", manifest)
