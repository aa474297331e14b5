"""A folder of references on disk: a manifest, and one file per range of blocks.

    manifest.json     provenance of the losses; `unfinished.json` until they are complete
    part-00000.npy    the blocks [start, start + part_size): 8 bytes of the block hash, and float32
    part-00001.npy    losses over every scored length; NaN for a block that is not scored

A part is renamed into place whole, with a checksum behind its array: it is done once it exists. A
later run may fill in blocks, part by part; nothing else of a folder ever changes. The manifest may
have more keys than are read here.

Shape suffixes: C = blocks, N = blocks of a part, L = scored lengths.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tokenize import TokenError
from typing import Self

import numpy as np
import numpy.typing as npt

from nemo_rod.files import interpreting, move_whole, open_file, read_json, write_whole
from nemo_rod.selection.arrays import Bytes, Ids, Mask, Records
from nemo_rod.selection.blocks import Blocks

LOSS_DEFINITION = "mean next-token loss of the first tokens of the block, nats, fp32"
SCHEMA = "rod-references-2"
# PyTorch's names of precisions -> those of manifests
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_CURE = "restore the folder from a copy, or remove it to compute it again"
_MANIFEST, _UNFINISHED = "manifest.json", "unfinished.json"
_PARTS, _SMALLEST = 100, 256  # parts at most: an interruption costs 1 %; least blocks of a part
_CHECKSUM_BYTES, _HEADER_BYTES = 16, 1 << 12  # the header's are at most
_MOST_BLOCKS = 1 << 31


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
        if not 0 <= self.start < self.stop <= _MOST_BLOCKS:
            raise ValueError(
                f"block ids [{self.start}, {self.stop}) hold no block to score, or too many"
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks that may have a reference."""
        return self.stop - self.start

    @property
    def part_size(self) -> int:
        """Blocks of every part but the last, which may be smaller."""
        return max(_SMALLEST, -(-self.num_blocks // _PARTS))

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return -(-self.num_blocks // self.part_size)

    @property
    def digest(self) -> str:
        """Identity of the losses, hex, whichever blocks and lengths are there so far."""
        values = {k: v for k, v in asdict(self).items() if k != "lengths"}
        text = json.dumps(values, sort_keys=True).encode()
        return hashlib.blake2b(text, digest_size=16, person=b"rod-refs-v2").hexdigest()

    def part_of(self, block_ids: Ids) -> Ids:
        """Returns the part of every block, int64 [C]."""
        return (block_ids - self.start) // self.part_size

    @property
    def kind(self) -> np.dtype[np.void]:
        """The NumPy dtype of one record."""
        return np.dtype([("head", "<u8"), ("loss", "<f4", (len(self.lengths),))])

    def size(self, number: int) -> int:
        """Returns the number of blocks of a part (N)."""
        return min(self.part_size, self.num_blocks - number * self.part_size)

    def absent(self, size: int) -> Records:
        """Returns the records [size] of blocks without any losses, read-only."""
        record = np.zeros((), dtype=self.kind)
        record["loss"] = np.nan
        return np.broadcast_to(record, size)  # takes no memory


def precision_name(precision: object, over: object = None) -> str:
    """Returns the name that manifests have for a precision: "bf16" for PyTorch's torch.bfloat16.

    `over` is that of the weights, if it may be another: "fp8 over bf16".
    """
    names = (str(each).removeprefix("torch.") for each in (precision, over or precision))
    name, weights = (_PRECISIONS.get(each, each) for each in names)
    return name if name == weights else f"{name} over {weights}"


def role_manifest(
    store: Blocks, role: str, *, model: str, lengths: Sequence[int], precision: str
) -> ReferenceManifest:
    """Returns the manifest of references for the blocks of a role; see `ReferenceManifest`.

    Raises:
        ValueError: the store has no block of this role.
    """
    ranges = {"adaptation": (0, store.num_adaptation), "replay": (store.num_adaptation, len(store))}
    start, stop = ranges.get(role, (0, 0))
    if start == stop:
        raise ValueError(
            f"there is no block of role {role!r}: choose adaptation or replay, and prepare such a "
            "source, or name it in the 'roles' of the job"
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
    """The references of one folder, memory-mapped; blocks of a missing part are absent."""

    path: Path
    manifest: ReferenceManifest
    parts: list[Records]

    @classmethod
    def open(cls, path: Path, *, unfinished: bool = False, verified: bool = True) -> Self:
        """Maps the parts of a folder; verifies their checksums now, or later by `verify`.

        Raises:
            ValueError: the folder is unfinished (unless accepted), of another version, or damaged.
        """
        file = path / _MANIFEST
        if unfinished and not file.is_file():
            file = path / _UNFINISHED
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist: write the references to the end to complete {path}, in a "
                "recipe by `nemo-rod reference`"
            )
        names = [field.name for field in fields(ReferenceManifest)]
        schema = read_json(file, "schema")["schema"]
        if schema != SCHEMA:
            raise ValueError(
                f"{file} has schema {schema!r}, expected {SCHEMA!r}: score again with this version"
            )
        content = read_json(file, *names)
        with interpreting(file, cure=_CURE):
            manifest = ReferenceManifest(**{name: content[name] for name in names})
            for field in fields(ReferenceManifest):
                kind = {"int": int, "str": str}.get(str(field.type), tuple)
                if type(value := getattr(manifest, field.name)) is not kind:
                    raise TypeError(f"{field.name} is {value!r}, expected {kind.__name__}")
        parts = [_part(path, manifest, n, verified) for n in range(manifest.num_parts)]
        return cls(path, manifest, parts)

    def verify(self, on_read: Callable[[str], object] = lambda note: None) -> None:
        """Reads all parts in order, also into the page cache; `on_read` as for `read_ahead`.

        Raises:
            ValueError: a part has another checksum.
        """
        for number in range(len(self.parts)):
            on_read(f"reads {_file(self.path, number)}")
            _part(self.path, self.manifest, number)
        on_read("")

    def records(self, block_ids: Ids) -> Records:
        """Returns the records of blocks of its range [C]; their loss is NaN if they have none."""
        records_C = np.empty(len(block_ids), dtype=self.manifest.kind)
        part_C = self.manifest.part_of(block_ids)
        row_C = block_ids - self.manifest.start - part_C * self.manifest.part_size
        order_C = np.argsort(part_C, kind="stable")
        ends = np.searchsorted(part_C[order_C], np.arange(len(self.parts)), side="right")
        for part, here in zip(self.parts, np.split(order_C, ends[:-1]), strict=True):
            records_C[here] = part.take(row_C[here])
        return records_C

    def present(self) -> Mask:
        """Returns a mask of the blocks of its range that have a reference, bool [stop - start]."""
        present = np.zeros(self.manifest.num_blocks, dtype=bool)  # takes memory where it is set
        for number, part in enumerate(self.parts):
            if part.strides[0]:
                first = number * self.manifest.part_size
                present[first : first + len(part)] = np.isfinite(part["loss"][:, 0])
        return present


class ReferenceWriter:
    """Writes the losses of blocks as they are scored, one part at a time.

    Args:
        path: folder of the references, new, unfinished or to be filled in.
        manifest: provenance of the losses.
        hashes: returns the hashes uint8 [C, 16] of block ids int64 [C], such as `store.hashes`.
        required: blocks that must be there in the end, bool [stop - start]; None for all.

    Attributes:
        manifest: provenance with all the lengths that the folder has, the columns of `append`.
        missing: ids of the blocks that are still to be scored, int64, ascending.

    Raises:
        ValueError: the folder has losses of another model or of other data, or is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: ReferenceManifest,
        hashes: Callable[[Ids], Bytes],
        required: Mask | None = None,
    ) -> None:
        self._path, self._hashes = Path(path), hashes
        required = np.ones(manifest.num_blocks, dtype=bool) if required is None else required
        folder = _open_existing(self._path, manifest)
        if folder is None:
            content = {"schema": SCHEMA, **asdict(manifest)}
            text = json.dumps(content, indent=2).encode() + b"\n"
            write_whole(self._path / _UNFINISHED, text)
            parts = [manifest.absent(manifest.size(n)) for n in range(manifest.num_parts)]
            folder = Folder(self._path, manifest, parts)
        self.manifest, self._parts = folder.manifest, folder.parts
        self.missing: Ids = manifest.start + np.flatnonzero(required & ~folder.present())
        self._begun: dict[int, Records] = {}

    def append(self, block_ids: npt.ArrayLike, losses_CL: npt.ArrayLike) -> None:
        """Adds the first missing blocks, in order; writes every part that they complete.

        Args:
            block_ids: int64 [C].
            losses_CL: losses over the lengths of `manifest`, nats per token, float32 [C, L].

        Raises:
            ValueError: a loss is not finite.
            OSError: the write failed, e.g. on a full disk; the parts before it are there.
        """
        ids, losses_CL = np.asarray(block_ids, dtype=np.int64), np.asarray(losses_CL)
        assert np.array_equal(ids, self.missing[: len(ids)]), "blocks out of order"
        finite_C = np.isfinite(losses_CL).all(axis=1)
        if not finite_C.all():
            raise ValueError(
                f"the scoring pass has losses that are not finite for {(~finite_C).sum()} blocks, "
                f"the first is block {ids[np.argmin(finite_C)]}: check the reference model and its "
                "precision"
            )
        part_C, manifest = self.manifest.part_of(ids), self.manifest
        left = self.missing[len(ids) :]
        next_part = manifest.part_of(left[:1]).tolist()
        for number in np.unique(part_C).tolist():
            here = part_C == number
            if number not in self._begun:
                self._begun[number] = self._parts[number].copy()
            rows = ids[here] - manifest.start - number * manifest.part_size
            self._begun[number]["head"][rows] = hash_heads(self._hashes(ids[here]))
            self._begun[number]["loss"][rows] = losses_CL[here]
            if [number] != next_part:
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, self._begun.pop(number))
                checksum = hashlib.blake2b(buffer.getvalue(), digest_size=_CHECKSUM_BYTES).digest()
                write_whole(_file(self._path, number), buffer.getvalue() + checksum)
        self.missing = left

    def close(self) -> None:
        """Marks the folder as complete."""
        assert not len(self.missing) and not self._begun, f"{len(self.missing)} blocks are missing"
        if (unfinished := self._path / _UNFINISHED).exists():
            move_whole(unfinished, self._path / _MANIFEST)


def holds(path: Path, manifest: ReferenceManifest, required: Mask | None = None) -> bool:
    """Returns whether a folder is complete, with references that have this manifest.

    Args:
        path: the folder.
        manifest: provenance of the references that it should hold; it may have further lengths.
        required: blocks that must be there, bool [stop - start]; None for all.

    Raises:
        ValueError: the folder holds other references, or is malformed.
    """
    folder = _open_existing(path, manifest)
    if folder is None or not (path / _MANIFEST).exists():
        return False
    present = folder.present()
    return bool(present.all() if required is None else present[required].all())


def hash_heads(hashes: Bytes) -> npt.NDArray[np.uint64]:
    """Returns the first 8 bytes of block hashes [C, 16], little-endian, uint64 [C]."""
    return np.ascontiguousarray(hashes[:, :8]).view("<u8")[:, 0]


def _open_existing(path: Path, manifest: ReferenceManifest) -> Folder | None:
    """Returns a folder, finished or not, with this manifest; None if there is none yet."""
    if not any((path / name).exists() for name in (_MANIFEST, _UNFINISHED)):
        return None
    folder = Folder.open(path, unfinished=True)
    if {*manifest.lengths} <= {*folder.manifest.lengths}:
        manifest = replace(manifest, lengths=folder.manifest.lengths)
    differences = [
        f"{field.name} {value!r} (expected {getattr(manifest, field.name)!r})"
        for field in fields(manifest)
        if (value := getattr(folder.manifest, field.name)) != getattr(manifest, field.name)
    ]
    if differences:
        raise ValueError(
            f"{path} holds references with {', '.join(differences)}: finish it with those values, "
            "name another folder, or remove it to compute it again"
        )
    return folder


def _file(path: Path, number: int) -> Path:
    return path / f"part-{number:05d}.npy"


def _part(path: Path, manifest: ReferenceManifest, number: int, verified: bool = True) -> Records:
    """Maps a part; if `verified`, refuses a wrong checksum."""
    file, kind, shape = _file(path, number), manifest.kind, (manifest.size(number),)
    try:
        size = file.stat().st_size - _CHECKSUM_BYTES
    except FileNotFoundError:
        return manifest.absent(manifest.size(number))
    checksum = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    try:
        if size > manifest.size(number) * kind.itemsize + _HEADER_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        with open_file(file) as stream:
            while verified and (left := max(0, size - stream.tell())):
                checksum.update(stream.read(min(left, 1 << 22)))
            if verified and stream.read() != checksum.digest():
                raise ValueError("checksum mismatch")
        records_N: Records = np.asarray(np.lib.format.open_memmap(file, mode="r"))
    except (OSError, ValueError, EOFError, TokenError) as error:  # headers are Python code
        raise ValueError(f"{file} cannot be read ({error}): {_CURE}") from error
    if records_N.shape != shape or records_N.dtype != kind:
        raise ValueError(
            f"{file} holds {records_N.dtype}{list(records_N.shape)}, expected {kind}{list(shape)}: "
            f"{_CURE}"
        )
    return records_N
