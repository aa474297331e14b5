"""Megatron's indexed datasets (``PREFIX.bin`` and ``PREFIX.idx``), tokenised by its own tools.

They are read here, as megatron-core would bring PyTorch and half a gigabyte along.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.input_files import HEAD, matching_files, refuse_placeholder
from nemo_rod.corpus.sources import SourceSpec, takes
from nemo_rod.corpus.tokenizer_identity import Tokenizer

_SAMPLE = 1000  # documents at either end of a file that show how its documents end
_MAGIC = b"MMIDIDX\0\0" + struct.pack("<Q", 1)  # and its version
_HEADER_BYTES = 34
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes


def blend(spec: SourceSpec) -> list[tuple[float | None, str]]:
    """Returns the prefixes of a source of kind megatron and their weights, None if it has none.

    As for Megatron-LM's ``--data-path``, `files` are prefixes, or weight, prefix, weight, prefix.

    Raises:
        ValueError: some prefixes have weights and others have not, a weight is not positive, or a
            cap would change the blend.
    """
    where, weights = f"domain.sources.{spec.name}.", list[float | None]()
    for item in spec.files:
        try:
            weights.append(float(item))
        except ValueError:
            weights.append(None)
    if all(weight is None for weight in weights):
        return [(None, prefix) for prefix in spec.files]
    pairs = [*zip(weights[::2], weights[1::2], map(str, spec.files[1::2]), strict=False)]
    if len(weights) % 2 or any(w is None or no is not None for w, no, _ in pairs):
        raise ValueError(
            f"{where}files={[*spec.files]} is not valid: expected prefixes, or a weight before "
            "each prefix, as in [0.3, a, 0.7, b]."
        )
    for weight, _, prefix in pairs:
        if not 0 < (weight or 0) < math.inf:
            raise ValueError(
                f"{where}files gives {prefix} the weight {weight}: expected a positive number; "
                "leave out a prefix that is not to be read."
            )
    for name in ("max_files", "max_documents", "max_tokens"):
        if (value := getattr(spec, name)) is not None:
            raise ValueError(
                f"{where}{name}={value} would cut the blend of files off in its last prefixes: use "
                "subsample, which keeps the blend, or no weights."
            )
    return [(weight, prefix) for weight, _, prefix in pairs]


def _check(spec: SourceSpec) -> None:
    is_weighted, where = blend(spec)[0][0] is not None, f"domain.sources.{spec.name}."
    copies = spec.options.get("copy", True)
    if spec.options.keys() - {"copy"} or not isinstance(copies, bool):
        raise ValueError(
            f"{where}options={dict(spec.options)} is not valid: kind=megatron takes copy=true, "
            "or false for blocks that are read from the .bin files themselves."
        )
    for name in ("subsample", "dedup", "document_holdout", "max_documents", "max_tokens", "files"):
        is_set = getattr(spec, name) != SourceSpec.__dataclass_fields__[name].default
        if not copies and (is_weighted if name == "files" else is_set):
            raise ValueError(
                f"{where}options.copy=false takes the .bin files as they are: leave out "
                f"{'the weights of files' if name == 'files' else name}, or copy."
            )


@takes("files", "options", check=_check, files=Sequence[str | float])
def read_indexed(spec: SourceSpec) -> list[Input]:
    """Returns the indexed datasets of a source of kind megatron, in order.

    With weights, each prefix keeps the `share` of its documents that makes its part of the tokens
    that of its weight, without a document being read twice: the scarcest keeps all.
    """
    weights, prefixes = zip(*blend(spec), strict=True)
    if any("://" in prefix for prefix in prefixes):
        raise ValueError(
            "kind=megatron reads local files: copy the .bin and .idx files, and name their prefix"
        )
    is_weighted = weights[0] is not None
    groups = []
    for group in [[prefix] for prefix in prefixes] if is_weighted else [prefixes]:
        patterns = [f"{prefix.removesuffix('.bin')}.bin" for prefix in group]
        matches = matching_files(dataclasses.replace(spec, files=patterns))
        groups.append([IndexedFile(Path(str(file)), name) for file, name in matches])
    inputs = [item for group in groups for item in group]
    if is_weighted:
        stats = [os.stat(item.place) for item in inputs]
        files = [(stat.st_dev, stat.st_ino) for stat in stats]  # links lead to one
        for item, file in zip(inputs, files, strict=True):
            if files.count(file) > 1:
                raise ValueError(f"{item.place} has two weights in files: give it one")
        tokens = [sum(item.tokens for item in group) for group in groups]
        shares = [w / max(1, count) for w, count in zip(weights, tokens, strict=True)]
        for group, part in zip(groups, shares, strict=True):
            for item in group:
                item.share = part / max(shares)
    if not spec.options.get("copy", True):
        for item in inputs:
            item.in_place = {**_now(Path(item.place)), "type": item.type.str}
    return [*inputs]


class IndexedFile(Input):
    """An indexed dataset; it yields the token ids of each document, int32, without its EOD.

    The index defines the documents, of one or several sequences each. Packing appends the EOD
    again, also to documents without one, so that blocks hold the stream of the file.

    Attributes:
        tokens: number of its tokens, with EODs.
        type: type of its ids.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name, path.stat().st_size, str(path))
        index = path.with_suffix(".idx")
        if not index.is_file():
            raise ValueError(f"{path} has no index: {index} is missing, put it beside the .bin")
        size = index.stat().st_size
        self.parts = [(str(Path(name).with_suffix(".idx")), size)]
        for file in (path, index):
            with file.open("rb") as handle:
                refuse_placeholder(file, head := handle.read(HEAD))
        header = head[:_HEADER_BYTES]
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            raise ValueError(f"{index} is no index of Megatron: fetch or write it again")
        code, sequences, ends = struct.unpack("<BQQ", header[len(_MAGIC) :])
        expected = _HEADER_BYTES + 12 * sequences + 8 * ends
        if size != expected:
            modes = ", with the modes of a multimodal one" * (size == expected + sequences)
            raise ValueError(
                f"{index} has {size} bytes{modes}, and its counts ask for {expected}: fetch it "
                "again, or give a dataset of text"
            )
        if code not in _TYPES:
            raise ValueError(
                f"{index} describes values of type {code}: expected whole numbers, as token ids "
                "are; write the dataset again with a type such as int32"
            )
        if not self.size:
            raise ValueError(f"{path} is empty: leave it out")
        arrays, place = [], _HEADER_BYTES
        for kind, count in ("<i4", sequences), ("<i8", sequences), ("<i8", ends):
            maps = np.memmap(index, kind, "r", place, (count,)) if count else np.empty(0, kind)
            arrays.append(maps)
            place += maps.nbytes
        self._lengths, self._starts, self._ends = arrays
        self._path, self.type = path, np.dtype(_TYPES[code])
        # As its tools write it, a sequence begins where the one before ends.
        ends = [self._place(0), self._place(sequences), *self._ends[:1], *self._ends[-1:]]
        if ends != [0, self.size, 0, sequences]:
            raise ValueError(f"{path} {self._mismatch() if sequences else 'has an empty index'}")
        self.tokens = self.size // self.type.itemsize
        self._vocab_size, self._eod_id = 1 << 31, -1

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a dataset whose documents do not end as those of the tokenizer."""
        self._vocab_size, self._eod_id = tokenizer.vocab_size, tokenizer.eod_id
        count = len(self._ends) - 1
        sample = {*range(min(_SAMPLE, count)), *range(max(0, count - _SAMPLE), count)}
        last, sizes = set(), set()
        for ids in self._documents(sorted(sample)):
            last.update(ids[-1:].tolist())
            sizes.add(len(ids))
        if len(last) == 1 and len(sample) > 2 and (end := last.pop()) != tokenizer.eod_id:
            raise ValueError(
                f"{self.place}: its documents end with token {end}, and those of the tokenizer "
                f"with {tokenizer.eod_id}: set domain.eod={end}, or name the tokenizer that made it"
            )
        if self.in_place and (last - {tokenizer.eod_id} or 1 in sizes):
            raise ValueError(
                f"{self.place}: some of its documents do not end with EOD, or have nothing else, "
                "so its blocks cannot be read from it: leave out options.copy"
            )
        if len(last) > 1 and len(sizes) == 1:
            raise ValueError(
                f"{self.place}: its documents have {sizes.pop()} tokens each and do not end with "
                "EOD: it holds packed blocks; give the dataset that they were packed from"
            )

    def read(self, start: int) -> Iterator[NDArray[np.int32]]:
        """Yields the token ids of every document, int32.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        numbers = range(start, len(self._ends) - 1)
        for number, ids in zip(numbers, self._documents(numbers), strict=True):
            outside = (ids < 0) | (ids >= self._vocab_size)
            if outside.any():
                raise ValueError(
                    f"{self.place}, document {number}: id {ids[outside][0]} is outside the "
                    f"vocabulary, which has {self._vocab_size}: name in domain.tokenizer the "
                    "tokenizer that made the dataset"
                )
            yield ids[: len(ids) - int(len(ids) > 0 and ids[-1] == self._eod_id)].astype("<i4")

    def bytes_read(self) -> int:
        """Returns the number of bytes of the .bin read so far."""
        return self._place(int(self._ends[self._done]))

    def _mismatch(self) -> str:
        """Returns in what the index differs from that of the whole file, in order, and the cure."""
        sizes = self._lengths.astype(np.int64) * self.type.itemsize
        order, end = np.argsort(self._starts, kind="stable"), int((self._starts + sizes).max())
        begin, follow = int(self._starts.min()), np.cumsum(sizes[order]) - sizes[order]
        if (
            (sizes < 0).any()
            or (self._starts[order] != begin + follow).any()
            or end > (self.size or 0)
        ):
            return (
                f"has {self.size} bytes, and its index ends at {end}: it was cut off, or belongs "
                "to another index; fetch both again"
            )
        what = f"documents of its sequences {self._ends[0]} to {self._ends[-1]} of {len(order)}"
        if (begin, end) != (0, self.size):
            what = f"bytes {begin} to {end} of its {self.size}"
        elif (order != np.arange(len(order))).any():
            what = "sequences in another order"
        return f"is whole, but its index lists {what}: give the index that was written with it"

    def _place(self, sequence: int) -> int:
        """Returns where a sequence begins in the .bin, and, after the last one, where that ends."""
        if sequence < len(self._starts):
            return int(self._starts[sequence])
        last = int(self._lengths[-1]) * self.type.itemsize if sequence else 0
        return int(self._starts[-1]) + last if sequence else 0

    def _documents(self, numbers: Iterable[int]) -> Iterator[NDArray[Any]]:
        # Not by a map, which would count as memory of the process, up to the whole file.
        with self._path.open("rb") as file:
            for number in numbers:
                first, end = (int(i) for i in self._ends[number : number + 2])
                begin, size = self._place(first), self._place(end) - self._place(first)
                tokens = int(self._lengths[first:end].sum(dtype=np.int64))
                if size != self.type.itemsize * tokens or not first <= end <= len(self._starts):
                    fault = self._mismatch()
                    if "in another order" not in fault:
                        fault = f"has an index that is damaged at document {number}: fetch it again"
                    raise ValueError(f"{self.place} {fault}")
                file.seek(begin)
                yield np.frombuffer(file.read(size), self.type)


def _now(path: Path) -> dict[str, Any]:
    info = path.stat()
    return {"path": os.path.abspath(path), "bytes": info.st_size, "modified": int(info.st_mtime)}


@functools.lru_cache(256)  # over all stores; a process may have 1024 files open
def _open_unchanged(path: str, inode: int, modified: int) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 - closed when it leaves the cache
    info = os.fstat(file.fileno())
    if (info.st_ino, info.st_mtime_ns) != (inode, modified):
        raise ValueError(f"{path} was changed while its blocks are read: put the file back")
    return file


class TokensInPlace:
    """Reads the tokens of blocks from .bin files: rows of their one stream, int64 `[n, 1]`.

    The files are not mapped: one that is cut off while it is read ends no process.

    Args:
        folder: folder of the split whose blocks they are.
        manifest: its manifest.

    Raises:
        ValueError: a file is missing, or was changed since the blocks were made.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._size: int = manifest["block_size"]
        self._files, self._starts = [], [0]  # the latter in tokens
        for entry in manifest["in_place"]:
            path, kind = Path(entry["path"]), np.dtype(entry["type"])
            now = {**_now(path), "type": entry["type"]} if path.is_file() else None
            if now != entry:
                state = "is missing" if now is None else "was changed after they were made"
                raise ValueError(
                    f"{path}, of which the blocks in {folder} are read, {state}: put the file back "
                    f"(of {entry['bytes']} bytes; touch -d @{entry['modified']} FILE if a copy has "
                    "another time), name its new place in their manifest.json, or remove "
                    f"{manifest['role']}/{manifest['source']} from the blocks and prepare it again"
                )
            info = path.stat()
            self._files.append((entry["path"], info.st_ino, info.st_mtime_ns, kind))
            self._starts.append(self._starts[-1] + entry["bytes"] // kind.itemsize)

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the tokens of blocks, int32 `[n, S]`."""
        tokens_NS = np.empty((len(rows), self._size), np.int32)
        for block_S, row in zip(tokens_NS, rows, strict=True):
            done = 0
            while done < self._size:  # a block may continue in the next file
                file, kind, place = self._place(int(row[0]) * self._size + done)
                data = os.pread(file.fileno(), (self._size - done) * kind.itemsize, place)
                ids = np.frombuffer(data, kind)
                if not len(ids):
                    raise ValueError(f"{file.name} was cut off while it is read: put it back")
                block_S[done : done + len(ids)] = ids
                done += len(ids)
        return tokens_NS

    def where(self, row: NDArray[np.int64]) -> str:
        """Returns where a block begins, int64 `[1]`, for error messages."""
        file, _, place = self._place(int(row[0]) * self._size)
        return f"{file.name}, from byte {place} on"

    def _place(self, token: int) -> tuple[BinaryIO, np.dtype[Any], int]:
        number = min(bisect.bisect_right(self._starts, token), len(self._files)) - 1
        path, inode, modified, kind = self._files[number]
        place = (token - self._starts[number]) * kind.itemsize
        return _open_unchanged(path, inode, modified), kind, place
