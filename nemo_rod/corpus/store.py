"""The block store: all blocks of a corpus under dense ids, read through memory maps.

    <root>/store.json                    the list of its sources; written last
    <root>/<role>/<source>/              training blocks (files: `nemo_rod.corpus.shards`)
    <root>/<role>/<source>/holdout/      held-out blocks

Ids cover the adaptation sources, then the replay sources, sorted by name within a role:

    0 ...... num_adaptation ............ len(store)
    | german | legal |  code  |  math  | web  |

Shape suffixes: C = requested block ids, S = tokens per block, N = blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_rod.corpus import shards
from nemo_rod.corpus.hashing import block_hashes
from nemo_rod.corpus.shards import SCHEMA
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import digest, interpreting, read_bytes, read_json
from nemo_rod.roles import ROLES, SourceRow

_Array = tuple[Any, Callable[[Any], NDArray[Any]]]  # a memory map, and the decoder of its rows
SPLITS = ("train", "holdout")
_SHARED = ("block_size", "tokenizer", "vocab_size", "eod_id")
_COUNTS = {"block_size": 1, "vocab_size": 1, "eod_id": 0, "count": 0, "blocks_per_shard": 1}
_TEXTS = ("tokenizer", "source", "role", "split", "digest")
_MOST = 1 << 48  # bound of every count in a manifest
_AGAIN = "remove its folder and prepare it again"


class BlockStore:
    """Blocks by id.

    Opening reads the manifests and checks the sizes of all files and the hashes of each source's
    first and last block; `checked_tokens` checks the blocks that it reads, `verify` all.

    Example:
        >>> BlockStore("runs/legal/blocks").tokens([0, 7]).shape
        (2, 4096)

    Args:
        root: the store's folder.
        split: ``train`` or ``holdout``.
        on_read: called with a description of each read, and with "" after it.

    Attributes:
        block_size: tokens per block (S).
        tokenizer_fingerprint: fingerprint of the tokenizer that made the blocks.
        vocab_size: vocabulary size; every token lies in [0, vocab_size).
        eod_id: the token after every document.
        digest: hex digest of all blocks, sources and settings.
        num_adaptation: number of adaptation blocks.
        num_replay: number of replay blocks.
        sources: all sources, ordered by block id.

    Raises:
        ValueError: there is no complete store, a file is missing or truncated, or the sources do
            not belong together.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        *,
        on_read: Callable[[str], object] = lambda description: None,
    ) -> None:
        assert split in SPLITS, f"split is one of {SPLITS}"
        self.root, self.split, self._on_read = Path(root), split, on_read
        try:
            listing = read_json(self.root / "store.json", "sources")
        except FileNotFoundError:
            raise ValueError(
                f"there is no complete block store in {self.root} (no store.json): "
                "run nemo-rod prepare, which resumes where it was interrupted"
            ) from None
        with interpreting(self.root / "store.json", cure=_AGAIN):
            sources = sorted((ROLES.index(s["role"]), str(s["name"])) for s in listing["sources"])
            if not sources:
                raise ValueError("it lists no source")
        below = "holdout" if split == "holdout" else ""
        folders = [self.root / ROLES[role] / name / below for role, name in sources]
        self._manifests = [(folder, _manifest(folder)) for folder in folders]
        folder, first = self._manifests[0]
        for other, manifest in self._manifests[1:]:
            for key in _SHARED:
                if manifest[key] != first[key]:
                    raise ValueError(
                        f"{other} and {folder} do not belong together: {key} is {manifest[key]} in "
                        f"the one and {first[key]} in the other: prepare them together"
                    )
        self.block_size: int = first["block_size"]
        self.tokenizer_fingerprint: str = first["tokenizer"]
        self.vocab_size: int = first["vocab_size"]
        self.eod_id: int = first["eod_id"]
        manifests = [manifest for _, manifest in self._manifests]
        lines = [f"{m['role']}/{m['source']}/{m['split']} {m['digest']}" for m in manifests]
        self.digest = digest("\n".join(lines).encode())
        self._starts = np.cumsum([0, *(manifest["count"] for manifest in manifests)])
        self.sources = tuple(
            SourceRow(manifest["source"], manifest["role"], int(start), manifest["count"])
            for manifest, start in zip(manifests, self._starts[:-1], strict=True)
        )
        self.num_adaptation = sum(s.count for s in self.sources if s.role == ROLES[0])
        self.num_replay = len(self) - self.num_adaptation
        self._shards: list[_Array] = []
        self._hashes: list[_Array] = []
        for source, (folder, manifest) in zip(self.sources, self._manifests, strict=True):
            # Checked first: a wrong count of ten million million would list as many shards.
            hashes = folder / "hash.npy"
            _check_size(hashes, shards.HASH_HEADER_BYTES + shards.HASH_BYTES * source.count)
            with hashes.open("rb") as handle:
                if handle.read(shards.HASH_HEADER_BYTES) != shards.hash_header(source.count):
                    raise ValueError(
                        f"{hashes} does not hold {source.count} block hashes: {_AGAIN}"
                    )
            with interpreting(folder / "manifest.json", cure=_AGAIN):
                read = shards.token_reader(folder, manifest)
                suffix, kind, width = shards.stored_as(manifest)
                sizes = shards.shard_sizes(source.count, manifest["blocks_per_shard"])
            for number, size in enumerate(sizes):
                path = shards.shard_path(folder, number, suffix)
                _check_size(path, size * width * kind.itemsize)
                if suffix == "bin":
                    _check_size(shards.shard_path(folder, number, "idx"), 42 + 20 * size)
                self._shards.append((np.memmap(path, kind, "r", shape=(size, width)), read))
            self._hashes.append((shards.map_hashes(folder, source.count), np.asarray))
        self._shard_starts = np.cumsum([0, *(len(shard) for shard, _ in self._shards)])
        for source in self.sources:
            if source.count:
                self.checked_tokens([source.start, source.start + source.count - 1])

    @property
    def hash_files(self) -> list[Path]:
        """The files of the block hashes, which lookups of references read at random."""
        return [folder / "hash.npy" for folder, _ in self._manifests]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[type[BlockStore], tuple[Path, str]]:
        # The receiving process opens the files itself: pickled memory maps would copy all tokens.
        return BlockStore, (self.root, self.split)

    def tokens(self, block_ids: ArrayLike) -> NDArray[np.int32]:
        """Returns the tokens of blocks with the ids int [C], int32 [C, S].

        Raises:
            IndexError: a block id is out of range.
        """
        ids = self._check_ids(block_ids)
        tokens_CS = np.empty((len(ids), self.block_size), dtype=np.int32)
        return self._gather(ids, self._shard_starts, self._shards, tokens_CS)

    def checked_tokens(self, block_ids: ArrayLike) -> NDArray[np.int32]:
        """Returns the tokens of blocks, each compared with its hash (see `tokens`).

        Raises:
            ValueError: a block was changed or damaged; the message names the file and the block.
        """
        ids = self._check_ids(block_ids)
        tokens_CS, hashes, source_C = self.tokens(ids), self.hashes(ids), self.source_index(ids)
        negative = (tokens_CS < 0).any(axis=1)  # no token is negative, and no hash covers one
        if negative.any():
            self._refuse_damaged(int(ids[negative.argmax()]))
        for source in np.unique(source_C):
            here = np.flatnonzero(source_C == source)
            actual = block_hashes(self.sources[source].name, tokens_CS[here])
            wrong = here[(hashes[here] != actual).any(axis=1)]
            if wrong.size:
                self._refuse_damaged(int(ids[wrong[0]]))
        return tokens_CS

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Yields all block ids in order, those of about a million tokens at a time."""
        rows = max(1, (1 << 20) // self.block_size)
        for first in range(0, len(self), rows):
            yield np.arange(first, min(first + rows, len(self)))

    def hashes(self, block_ids: ArrayLike) -> NDArray[np.uint8]:
        """Returns the block hashes, uint8 [C, 16] (see `tokens`)."""
        ids = self._check_ids(block_ids)
        hashes = np.empty((len(ids), shards.HASH_BYTES), dtype=np.uint8)
        return self._gather(ids, self._starts, self._hashes, hashes)

    def source_index(self, block_ids: ArrayLike) -> NDArray[np.int64]:
        """Returns the index of each block's source in `sources`, int64 [C] (see `tokens`)."""
        return np.searchsorted(self._starts, self._check_ids(block_ids), side="right") - 1

    def is_replay(self, block_ids: ArrayLike) -> NDArray[np.bool_]:
        """Returns whether each block is replay, bool [C] (see `tokens`)."""
        return self._check_ids(block_ids) >= self.num_adaptation

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a tokenizer whose fingerprint is not that of the one that made the blocks."""
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise ValueError(
                f"the blocks in {self.root} were made by a different tokenizer (fingerprint "
                f"{self.tokenizer_fingerprint}, now {tokenizer.fingerprint}): use that one, or "
                "prepare the blocks again with this one"
            )

    def verify(self) -> None:
        """Checks every block against its hash, and the hashes against the manifest.

        Raises:
            ValueError: a hash differs; the message names the file and the block.
        """
        for folder, manifest in self._manifests:
            held = (folder / "hash.npy").stat()
            if held.st_size > 1 << 30 and held.st_blocks * 512 < held.st_size // 2:
                raise ValueError(f"{folder / 'hash.npy'} has holes, unlike any hashes: {_AGAIN}")
            with interpreting(folder / "manifest.json", cure=_AGAIN):
                actual = shards.split_digest(manifest, folder)
            if actual != manifest["digest"]:
                raise ValueError(
                    f"{folder / 'hash.npy'} does not match the digest in its manifest.json: one of "
                    f"the two was changed or damaged, {_AGAIN}"
                )
            sizes = shards.shard_sizes(manifest["count"], manifest["blocks_per_shard"])
            for number, size in enumerate(sizes if "in_place" not in manifest else ()):
                path = shards.shard_path(folder, number, "idx")
                if read_bytes(path, 1 << 30) != shards.index_bytes(size, self.block_size):
                    raise ValueError(f"{path} was changed or damaged: {_AGAIN}")
        for ids in self.chunks():
            self.checked_tokens(ids)

    def _refuse_damaged(self, block_id: int) -> None:
        number = int(np.searchsorted(self._shard_starts, block_id, side="right")) - 1
        (shard, read), inside = self._shards[number], block_id - self._shard_starts[number]
        source = self.sources[int(self.source_index([block_id])[0])]
        place = getattr(read, "where", lambda row: shard.filename)(shard[inside])
        raise ValueError(
            f"{place}: block {inside} does not match its hash in hash.npy: one of them was changed "
            f"or damaged, remove {self.root / source.role / source.name} and prepare it again"
        )

    def _check_ids(self, block_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(block_ids)
        assert ids.ndim == 1 and (ids.size == 0 or ids.dtype.kind in "iu"), "block ids are int [C]"
        outside = ids[(ids < 0) | (ids >= len(self))]
        if outside.size:
            raise IndexError(f"block id {outside[0]} is outside [0, {len(self)}) of {self.root}")
        return ids.astype(np.int64, copy=False)

    def _gather(
        self, ids: NDArray[Any], starts: NDArray[Any], arrays: Sequence[_Array], rows: NDArray[Any]
    ) -> NDArray[Any]:
        """Fills the rows of ids from arrays, each of which begins with the id in `starts`."""
        array_C = np.searchsorted(starts, ids, side="right") - 1
        for index in np.unique(array_C):
            here = np.flatnonzero(array_C == index)
            array, read = arrays[index]
            self._on_read(f"reads blocks of {array.filename}")
            rows[here] = read(array[ids[here] - starts[index]])
        self._on_read("")
        return rows


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = read_json(path, "schema", *_COUNTS, *_TEXTS)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: prepare the blocks again") from None
    if (schema := manifest["schema"]) != SCHEMA:
        raise ValueError(f"{path} has schema {schema}, this version reads {SCHEMA}: {_AGAIN}")
    with interpreting(path, cure=_AGAIN):
        for key, least in _COUNTS.items():
            if not isinstance(manifest[key], int) or not least <= manifest[key] < _MOST:
                raise ValueError(f"{key} is {manifest[key]!r}, expected a number from {least} on")
        for key in _TEXTS:
            if not isinstance(manifest[key], str):
                raise ValueError(f"{key} is {manifest[key]!r}, expected a text")
    return manifest


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        state = "is missing" if size is None else f"has {size} bytes"
        raise ValueError(f"{path} {state}, expected {expected} bytes: {_AGAIN}")
