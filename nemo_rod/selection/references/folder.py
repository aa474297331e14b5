"""The on-disk format of references: the record of a block, a folder's arrays and its manifest.

A folder is complete once it has `manifest.json`, and then holds arrays dense by block id: the
losses over every scored length, the head of the block's hash, and the checksum of the block's
record in its log. The manifest may have more keys than are read here.

Shape suffixes: C = blocks, N = all blocks of a folder, L = scored lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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

LOSS_DEFINITION = "mean next-token loss of the first tokens of the block, nats, fp32"
SCHEMA = "rod-references-2"
FILES = ("loss", "hash", "check")
_CURE = "restore the folder from a copy, or remove it to compute it again"
ROWS = 1 << 20  # blocks handled at a time, which bounds the memory


@dataclass(frozen=True, kw_only=True)
class ReferenceManifest:
    """Provenance of reference losses."""

    model: str  # digest of the reference model's weights
    tokenizer: str  # fingerprint of the tokenizer
    store: str  # digest of the block store
    block_size: int  # tokens per block
    lengths: tuple[int, ...]  # scored tokens of a block, from its start, descending
    start: int  # first block id
    stop: int  # block id after the last
    precision: str  # arithmetic of the forward pass, such as "bf16"
    loss: str = LOSS_DEFINITION

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not all(type(n) is int and 0 < n <= self.block_size for n in self.lengths):
            raise ValueError(f"lengths is {self.lengths}, expected tokens of a block")
        if [*self.lengths] != sorted({*self.lengths}, reverse=True) or not self.lengths:
            raise ValueError(f"lengths is {self.lengths}, expected descending numbers of tokens")
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


def record_type(lengths: Sequence[int]) -> np.dtype:
    """Returns the type of a block's record in a log."""
    return np.dtype([("id", "<u8"), ("loss", "<f4", (len(lengths),)), ("head", "<u8")])


def array_types(manifest: ReferenceManifest) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
    """Returns the dtype of every file, and its shape."""
    rows = manifest.num_blocks
    loss = (np.float32, (rows, len(manifest.lengths)))
    return {"loss": loss, "hash": (np.uint64, (rows,)), "check": (np.uint32, (rows,))}


def role_manifest(
    store: Blocks, role: str, *, model: str, lengths: Sequence[int], precision: str
) -> ReferenceManifest:
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
        lengths=tuple(lengths),
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
    losses: Nats  # [N, L]
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
    for name, (dtype, shape) in array_types(manifest).items():
        array_file = path / f"{name}.npy"
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
    return Folder(path, manifest, digest, arrays["loss"], arrays["hash"], arrays["check"])


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
            kind = {"int": int, "str": str}.get(str(field.type), tuple)
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
