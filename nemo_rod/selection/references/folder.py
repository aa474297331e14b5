"""The on-disk format of references: the record of a block, a folder's arrays and its manifest.

A folder is complete once it has `manifest.json`, and then holds `ARRAYS`, dense by block id: the
partial sums of the token losses, the head of the block's hash, and the checksum of the block's
record in its log. The manifest may have more keys than are read here.

Shape suffixes: C = blocks, N = all blocks of a folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.files import interpreting, read_json
from nemo_rod.selection.arrays import Bytes, Nats, Records
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.curriculum.record_log import crc32_rows

NUM_PARTS = 8
LOSS_DEFINITION = "mean next-token loss of the block, nats, 8 partial sums, fp32"
SCHEMA = "rod-references-1"
RECORD = np.dtype([("id", "<u8"), ("sums", "<f4", (NUM_PARTS,)), ("head", "<u8")])
# Of every file: its dtype, and the shape of one block's entry.
ARRAYS: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
    "sums": (np.float32, (NUM_PARTS,)),
    "hash": (np.uint64, ()),
    "check": (np.uint32, ()),
}
_CURE = "restore the folder from a copy, or remove it to compute it again"
ROWS = 1 << 20  # blocks handled at a time, which bounds the memory


@dataclass(frozen=True, kw_only=True)
class ReferenceManifest:
    """Provenance of reference losses."""

    model: str  # digest of the reference model's weights
    tokenizer: str  # fingerprint of the tokenizer
    store: str  # digest of the block store
    block_size: int  # tokens per block, a multiple of 8
    start: int  # first block id
    stop: int  # block id after the last
    precision: str  # arithmetic of the forward pass, such as "bf16"
    loss: str = LOSS_DEFINITION

    def __post_init__(self) -> None:
        if self.block_size < NUM_PARTS or self.block_size % NUM_PARTS:
            raise ValueError(
                f"the block size is {self.block_size}, expected a multiple of {NUM_PARTS}: "
                "references keep the loss of every eighth of a block"
            )
        if not 0 <= self.start < self.stop:
            raise ValueError(f"block ids [{self.start}, {self.stop}) hold no block to score")

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a reference."""
        return self.stop - self.start

    def difference(self, other: ReferenceManifest) -> str:
        """Returns a text that names every field that differs; "" if none does."""
        return ", ".join(
            f"{field.name} {getattr(self, field.name)!r} (expected {getattr(other, field.name)!r})"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )


def role_manifest(store: Blocks, role: str, *, model: str, precision: str) -> ReferenceManifest:
    """Returns the manifest of references for all blocks of a role; see `ReferenceManifest`.

    Raises:
        ValueError: The store has no block of this role.
    """
    ranges = {
        "adaptation": (0, store.num_adaptation),
        "replay": (store.num_adaptation, len(store)),
    }
    start, stop = ranges.get(role, (0, 0))
    if start == stop:
        raise ValueError(
            f"the block store has no block of role {role!r}: choose adaptation or replay, and "
            "prepare such a source"
        )
    return ReferenceManifest(
        model=model,
        tokenizer=store.tokenizer_fingerprint,
        store=store.digest,
        block_size=store.block_size,
        start=start,
        stop=stop,
        precision=precision,
    )


@dataclass(frozen=True, eq=False)
class Folder:
    """One compacted folder, memory-mapped."""

    path: Path
    manifest: ReferenceManifest
    digest: str
    sums: Nats
    heads: npt.NDArray[np.uint64]
    checks: npt.NDArray[np.uint32]


def open_folder(path: Path) -> Folder:
    """Maps the arrays of a compacted folder.

    Raises:
        ValueError: The folder is incomplete, of another version, or malformed.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise ValueError(
            f"{file} does not exist: run `nemo-rod reference` to the end to complete {path}"
        )
    names = [field.name for field in fields(ReferenceManifest)]
    content = read_json(file, "schema", "digest", *names)
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"{file} has schema {content['schema']!r}, expected {SCHEMA!r}: score again with this "
            "version"
        )
    manifest = read_manifest(file, {name: content[name] for name in names})
    with interpreting(file, cure=_CURE):
        digest: str = content["digest"]
        digest.encode()
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, entry) in ARRAYS.items():
        array_file, shape = path / f"{name}.npy", (manifest.num_blocks, *entry)
        try:
            array = np.lib.format.open_memmap(array_file, mode="r")  # no archive
        except (OSError, ValueError, EOFError, TokenError) as error:  # headers are Python
            raise ValueError(f"{array_file} cannot be read ({error}): {_CURE}") from error
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{array_file} holds {array.dtype}{list(array.shape)}, expected "
                f"{np.dtype(dtype)}{list(shape)}: {_CURE}"
            )
        arrays[name] = array
    return Folder(path, manifest, digest, arrays["sums"], arrays["hash"], arrays["check"])


def holds(path: Path, manifest: ReferenceManifest, *, cure: str) -> bool:
    """Returns whether a folder is complete, with references that have this manifest.

    Args:
        path: The folder.
        manifest: Provenance of the references that it should hold.
        cure: Remedy for a folder of other references.

    Raises:
        ValueError: The folder is complete but holds other references, or is malformed.
    """
    if not (path / "manifest.json").exists():
        return False
    actual = open_folder(path).manifest
    if actual != manifest:
        raise ValueError(f"{path} holds references with {actual.difference(manifest)}: {cure}")
    return True


def read_manifest(path: Path, values: dict[str, Any]) -> ReferenceManifest:
    """Returns the manifest from the values in a file; refuses values that no manifest has."""
    with interpreting(path, cure="restore it from a copy, or remove it to compute it again"):
        manifest = ReferenceManifest(**values)
        for field in fields(ReferenceManifest):
            kind = int if field.type == "int" else str
            if type(value := getattr(manifest, field.name)) is not kind:
                raise TypeError(f"{field.name} is {value!r}, expected {kind.__name__}")
    return manifest


def hash_heads(hashes: Bytes) -> npt.NDArray[np.uint64]:
    """Returns the first 8 bytes of block hashes [C, 16], little-endian, uint64 [C]."""
    return np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]


def record_checks(records_C: Records) -> npt.NDArray[np.uint32]:
    """Returns the checksums of records, uint32 [C]."""
    return crc32_rows(row_bytes(records_C))


def manifest_digest(manifest: ReferenceManifest, *arrays: npt.NDArray[np.generic]) -> str:
    """Returns the hex digest of a manifest and the contents of its arrays."""
    digest = hashlib.blake2b(digest_size=16, person=b"rod-refs-v1")
    digest.update(json.dumps(asdict(manifest), sort_keys=True).encode())
    for array in arrays:
        for first in range(0, len(array), ROWS):
            digest.update(np.ascontiguousarray(array[first : first + ROWS]).data)
    return digest.hexdigest()


def row_bytes(records_C: Records) -> Bytes:
    """Returns the bytes of records of any type, uint8 [C, its size]."""
    return np.ascontiguousarray(records_C).view(np.uint8).reshape(-1, records_C.dtype.itemsize)
