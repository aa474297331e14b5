"""The files of one split of one source, written as a stream that can be interrupted and resumed.

    tokens-00000.bin   int32 little-endian [n, S], at most a million blocks per shard
    tokens-00000.idx   Megatron's index for it: every block is a sequence and a document
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
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nemo_rod.files import sync, write_json

SCHEMA = 1
BLOCKS_PER_SHARD = 1_000_000
HASH_BYTES = 16
HASH_HEADER_BYTES = 128
# Two stores are the same if these fields and the block hashes are.
_IDENTITY = ("schema", "source", "role", "split", "count", "block_size", "tokenizer", "eod_id")


def shard_sizes(count: int, per_shard: int) -> list[int]:
    """Returns the number of blocks in each shard of a split of `count` blocks."""
    return [min(per_shard, count - start) for start in range(0, count, per_shard)]


def shard_path(folder: Path, index: int, suffix: str) -> Path:
    """Returns the file of a shard; the suffix is ``bin`` or ``idx``."""
    return folder / f"tokens-{index:05d}.{suffix}"


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
    if count == 0:
        return np.empty((0, HASH_BYTES), dtype=np.uint8)
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
    """Appends blocks of S tokens to the files of a split, after the `count` known to be safe.

    Raises:
        ValueError: The files hold fewer than `count` blocks.
    """

    def __init__(
        self, folder: Path, block_size: int, count: int = 0, per_shard: int = BLOCKS_PER_SHARD
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count, self._hashes = folder, count, folder / "hash.npy"
        self._block_size, self._per_shard = block_size, per_shard
        self._open: dict[Path, BinaryIO] = {}
        lengths = {
            shard_path(folder, index, "bin"): 4 * block_size * size
            for index, size in enumerate(shard_sizes(count, per_shard))
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

    def append(self, tokens_NS: NDArray[np.int32], hashes: NDArray[np.uint8]) -> None:
        """Adds blocks, int32 [N, S], and their hashes, uint8 [N, 16]."""
        while len(tokens_NS):
            shard, inside = divmod(self.count, self._per_shard)
            fit = min(self._per_shard - inside, len(tokens_NS))
            file = self._file(shard_path(self.folder, shard, "bin"))
            file.write(np.ascontiguousarray(tokens_NS[:fit], dtype="<i4").data)
            self._file(self._hashes).write(np.ascontiguousarray(hashes[:fit]).data)
            self.count += fit
            tokens_NS, hashes = tokens_NS[fit:], hashes[fit:]

    def sync(self) -> None:
        """Waits until everything appended is on disk."""
        for handle in self._open.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.close()  # the next block may belong to another shard
        sync(self.folder)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Writes the indices and the manifest, which gets its counts and its digest here."""
        self.sync()
        with self._hashes.open("r+b") as handle:
            handle.write(hash_header(self.count))
        sync(self._hashes)
        for index, size in enumerate(shard_sizes(self.count, self._per_shard)):
            path = shard_path(self.folder, index, "idx")
            path.write_bytes(index_bytes(size, self._block_size))
            sync(path)
        manifest = {**manifest, "count": self.count, "blocks_per_shard": self._per_shard}
        manifest["digest"] = split_digest(manifest, self.folder)
        write_json(self.folder / "manifest.json", manifest)

    def close(self) -> None:
        """Closes the files; unsynced data may be lost."""
        while self._open:
            _, handle = self._open.popitem()
            with suppress(OSError):  # a full disk was reported when the data was written
                handle.close()

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._open:
            self._open[path] = path.open("ab")
        return self._open[path]
