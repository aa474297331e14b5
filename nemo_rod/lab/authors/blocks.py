"""The authors' blocks as a block store.

    part_00000.parquet ...   token_ids, origin, origin_tag, content_hash, split, ...

Each origin becomes the source of its name, with its blocks in the order of their rows. What they
hold out stays held out. Their hash of a block covers other bytes than ours, so a table of theirs
lies beside the sources, by block id: `content_hash.npy`, uint8 [N, 32].

Shape suffixes: S = tokens per block, N = blocks.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.hashing import block_hashes, holdout_values
from nemo_rod.corpus.input_files import HEAD, refuse_placeholder
from nemo_rod.corpus.shards import BLOCKS_PER_SHARD, SCHEMA, SplitWriter
from nemo_rod.corpus.store import SPLITS, BlockStore
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import check_name, interpreting, open_file, write_json
from nemo_rod.roles import ROLES
from nemo_rod.selection.references.folder import hash_heads

Hashes = NDArray[np.uint8]  # the authors', [N, 32]
HASHES = "content_hash.npy"
_ROWS = 256  # read at once: 8 MB of int64
_MOST_TOKENS, _MOST_TEXTS = 1 << 20, 1 << 28  # a block's tokens, on average; a text column's bytes


def content_hash(origin: str, tokens: NDArray[np.int32]) -> bytes:
    """Returns the authors' hash of a block: sha256 of its origin and tokens as compact JSON."""
    return _hash_rows(origin, tokens[None])[0].tobytes()


def _hash_rows(origin: str, tokens_NS: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Returns the `content_hash` of every row, uint8 [N, 32]."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count, size = tokens_NS.shape
    numbers = pa.array(tokens_NS.reshape(-1)).cast(pa.string())
    rows = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * size, numbers)
    head = f'{{"origin":{json.dumps(origin, ensure_ascii=False)},"token_ids":['.encode()
    texts = (head + text.as_py().encode() + b"]}" for text in pc.binary_join(rows, ","))
    return _join_hashes(hashlib.sha256(text).digest() for text in texts)


def is_hash(value: object) -> bool:
    """Returns whether a value is a content hash in hex."""
    return isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value) is not None


def as_bytes(names: Iterable[str]) -> NDArray[np.uint8]:
    """Returns content hashes in hex as uint8 [N, 32]."""
    return _join_hashes(map(bytes.fromhex, names))


def _join_hashes(hashes: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 32)


def read_columns(file: Path, *names: str, rows: int = _ROWS) -> Iterator[dict[str, Any]]:
    """Yields rows of a file of theirs as Arrow arrays by column, each of its type, without nulls.

    Raises:
        ValueError: a column is missing, or a value is null or of another type; the message names
            the file and the row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text, number = (pa.string(), "a text"), (pa.int64(), "a whole number")
    types = {
        "token_ids": (pa.list_(pa.int64()), "a list of whole numbers"), "origin": text,
        "split": text, "content_hash": (pa.string(), "64 hexadecimal digits"),
        "origin_tag": number, "n_response_tokens": number, "ref_loss": (pa.float64(), "a number"),
    }  # fmt: skip
    with open_file(file) as head:
        refuse_placeholder(file, head.read(HEAD))
    with interpreting(file, cure="copy it again"), open_table(file, names) as table:
        first = 1
        for batch in table.iter_batches(batch_size=rows, columns=[*names]):
            columns = {}
            for name in names:
                kind, expected = types[name]
                given = batch.column(name)
                words = given.dictionary if pa.types.is_dictionary(given.type) else given[:0]
                # longer than a name or hash: a dictionary's text may be there often
                if len(words) and (longest := pc.max(pc.binary_length(words)).as_py()) > 1 << 12:
                    raise ValueError(f"column {name} has a text of {longest:,} bytes")
                try:
                    columns[name] = given.cast(kind)
                except pa.ArrowException:  # one bad value becomes null
                    columns[name] = pa.concat_arrays(_each(given, kind))
                is_wrong = columns[name].is_null().to_numpy(zero_copy_only=False)
                if name == "content_hash":
                    is_wrong = is_wrong | [
                        not is_hash(value) for value in columns[name].to_pylist()
                    ]
                if is_wrong.any():
                    row = int(np.argmax(is_wrong))
                    raise ValueError(
                        f"{file}, row {first + row}: {name} is {given[row].as_py()!r:.80}, "
                        f"expected {expected}: copy it again"
                    )
            yield columns
            first += len(batch)


def _each(column: Any, kind: Any) -> Iterator[Any]:
    """Yields every value of a column as one of a type, null if it is none."""
    import pyarrow as pa

    for value in column.to_pylist():  # a slice of lists would be cast with its neighbours
        try:
            yield pa.array([value], column.type).cast(kind)
        except pa.ArrowException:
            yield pa.nulls(1, kind)


def content_hashes(store: BlockStore, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns the authors' hashes of blocks of a store, uint8 [C, 32].

    Those of an imported store are in its table; for any other, the name of a source is its origin.
    """
    if store.split == "train" and (store.root / HASHES).is_file():
        hashes: NDArray[np.uint8] = np.load(store.root / HASHES, mmap_mode="r")[block_ids]
        return hashes
    names = [store.sources[index].name for index in store.source_index(block_ids)]
    rows = zip(names, store.checked_tokens(block_ids), strict=True)
    return _join_hashes(content_hash(name, tokens) for name, tokens in rows)


class _Making:
    """A block store that is being made of rows."""

    def __init__(
        self, work: Path, folder: Path, tokenizer: Tokenizer, block_size: int | None
    ) -> None:
        self.work, self.folder, self.tokenizer = work, folder, tokenizer
        self.block_size = block_size  # None until the first row
        # by role and origin: writers by split, and the authors' hashes of training blocks
        self.sources: dict[tuple[str, str], tuple[dict[str, SplitWriter], list[Hashes]]] = {}

    def check(self, origin: str, role: str, tokens: NDArray[np.int32]) -> None:
        """Refuses rows that belong to no store together with those before them."""
        check_name("source", origin)
        self.block_size = size = self.block_size or tokens.shape[1]
        if (ROLES[1 - ROLES.index(role)], origin) in self.sources:
            raise ValueError(
                f"{self.folder} has blocks of origin {origin} in both roles: names of sources must "
                "differ, rename one of them in the authors' corpus"
            )
        if tokens.shape[1] != size:
            raise ValueError(
                f"{self.folder} has a block of {tokens.shape[1]} tokens, expected {size} as the "
                "first one, or domain.block_size of the recipe: import one block size at a time"
            )
        if (largest := int(tokens.max())) >= self.tokenizer.vocab_size:
            raise ValueError(
                f"{self.folder} has the token id {largest} in origin {origin}, but the tokenizer "
                f"has {self.tokenizer.vocab_size} ids: name the one that made the blocks"
            )

    def add(
        self, origin: str, role: str, split: str, tokens: NDArray[np.int32], hashes: Hashes
    ) -> None:
        """Writes rows that were checked."""
        if (key := (role, origin)) not in self.sources:
            target = self.work / role / origin
            known = {"block_size": self.block_size, "blocks_per_shard": BLOCKS_PER_SHARD}
            places = zip(SPLITS, (target, target / "holdout"), strict=True)
            self.sources[key] = {s: SplitWriter(place, known) for s, place in places}, []
        writers, trained = self.sources[key]
        writers[split].append(tokens, block_hashes(origin, tokens))
        if split == "train":
            trained.append(hashes)

    def finish(self, parts: list[Path], pool_share: float) -> None:
        """Writes the manifests, the table of hashes and the list of sources."""
        if self.block_size is None or not self.sources:
            raise ValueError(f"{self.folder} has no block: copy it again")
        order = sorted(self.sources, key=lambda key: (ROLES.index(key[0]), key[1]))
        reading = {"kind": "authors"} | ({"pool_share": pool_share} if pool_share < 1 else {})
        files = [{"name": p.name, "bytes": p.stat().st_size, "documents": 0} for p in parts]
        for role, name in order:
            writers, _ = self.sources[role, name]
            counts = {split: writer.count for split, writer in writers.items()}
            if not counts["train"]:
                raise ValueError(
                    f"{self.folder} has no block to train on of origin {name}: copy it again"
                )
            total = sum(counts.values())
            manifest: dict[str, Any] = {
                "schema": SCHEMA,
                "source": name,
                "role": role,
                "block_size": self.block_size,
                "tokenizer": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "eod_id": self.tokenizer.eod_id,
                "holdout": {"fraction": counts["holdout"] / total, "seed": 42, "unit": "block"},
                "holdout_floor": None,
                "replay_ratio": None,
                "reading": reading,
                "files": files,
                "documents": 0,  # they are not counted
                "tokens": total * self.block_size,
                "dropped_tokens": 0,
            }
            for split, writer in writers.items():
                writer.finish({**manifest, "split": split})
        table = [hashes for key in order for hashes in self.sources[key][1]]
        np.save(self.work / HASHES, np.concatenate(table))
        names = [{"role": role, "name": name} for role, name in order]
        write_json(self.work / "store.json", {"schema": SCHEMA, "sources": names})


def import_blocks(
    folder: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    block_size: int | None = None,
    pool_share: float = 1.0,
    check_every: int = 1,
    repeated: str = "refuse",
    progress: Callable[[int], object] = lambda done: None,
) -> BlockStore:
    """Makes a block store of the authors' blocks.

    Args:
        folder: their folder of parquet parts.
        out: folder of the new store.
        tokenizer: the tokenizer that made the blocks, which they do not name.
        block_size: tokens that every block must have; None for those of the first one.
        pool_share: share of the replay blocks to train on, as `data_mixer.replay_share` draws it
            with its seed of 42; all held-out blocks stay.
        check_every: one of so many blocks is compared with its content hash.
        repeated: whether to "refuse" or "keep" blocks that are there twice, or in both splits.
        progress: called with the number of blocks done.

    Raises:
        ValueError: a part is missing or has other columns, or a row does not fit its hash, the
            tokenizer or the other rows, or recurs; nothing is left of the store.
    """
    parts = _parts(folder)
    if out.exists():
        raise ValueError(f"{out} exists: choose a new folder, or remove it")
    work = out.with_name(f"{out.name}.importing")
    shutil.rmtree(work, ignore_errors=True)
    making = _Making(work, folder, tokenizer, block_size)
    done = seen = 0
    num_replay = _survey(folder, parts, may_repeat=repeated == "keep")
    is_drawn = np.zeros(num_replay, dtype=bool)  # replay of both splits, in their run's order
    is_drawn[random.Random(42).sample(range(num_replay), round(num_replay * pool_share))] = True
    try:
        for origin, role, split, tokens, hashes in (r for part in parts for r in _read(part)):
            making.check(origin, role, tokens)
            checked = np.arange(-done % check_every, len(tokens), check_every)
            differs = (_hash_rows(origin, tokens[checked]) != hashes[checked]).any(axis=1)
            for row in checked[differs]:
                raise ValueError(
                    f"{folder}: row {done + row + 1}, of origin {origin}, has the content_hash "
                    f"{hashes[row].tobytes().hex()} of other tokens: copy the folder again"
                )
            done += len(tokens)
            if role == "replay":
                kept = is_drawn[seen : seen + len(tokens)] | (split == "holdout")
                seen += len(tokens)
                tokens, hashes = tokens[kept], hashes[kept]
            making.add(origin, role, split, tokens, hashes)
            progress(done)
        making.finish(parts, pool_share)
        if repeated != "keep":  # one origin may hold out what another trains on
            train, held = (
                [holdout_values(split.tokens(ids)) for ids in split.chunks()]
                for split in (BlockStore(work), BlockStore(work, "holdout"))
            )
            leaks = int(np.isin(np.concatenate(train), np.concatenate(held)).sum()) if held else 0
            if leaks:
                raise ValueError(
                    f"{folder} has {leaks} training blocks that another origin holds out: their "
                    "losses would be of trained text; remove them, or import all with repeated=keep"
                )
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return BlockStore(out)


def _parts(folder: Path) -> list[Path]:
    """Returns the parts of a folder, in order; refuses one with a gap."""
    parts: dict[int, Path] = {}
    for part in sorted(folder.glob("part_*.parquet")):
        found = re.fullmatch(r"part_(\d+)", part.stem, re.ASCII)
        if not found or int(found[1]) in parts:
            raise ValueError(
                f"{part} is none of the parts that the authors' code wrote, or another copy of "
                "one: leave one file for each part"
            )
        parts[int(found[1])] = part
    numbers = sorted(parts)
    if not numbers:
        raise ValueError(
            f"{folder} has no part_00000.parquet: name the folder of blocks that the authors' "
            "code wrote"
        )
    if missing := sorted({*range(numbers[-1] + 1)} - {*numbers}):
        raise ValueError(
            f"{folder} lacks part_{missing[0]:05d}.parquet, but has part_{numbers[-1]:05d}"
            ".parquet: copy the folder again"
        )
    return [parts[number] for number in numbers]


def _survey(folder: Path, parts: list[Path], *, may_repeat: bool) -> int:
    """Returns the number of replay blocks; refuses blocks that are there twice, by their hashes."""
    heads, num_replay = [np.empty(0, np.uint64)], 0
    for part in parts:
        for columns in read_columns(part, "content_hash", "origin_tag"):
            heads.append(hash_heads(as_bytes(columns["content_hash"].to_pylist())))
            num_replay += int((columns["origin_tag"].to_numpy() == 1).sum())
    _, firsts = np.unique(all_heads := np.concatenate(heads), return_index=True)
    again = np.setdiff1d(np.arange(len(all_heads)), firsts)
    if len(again) and not may_repeat:
        raise ValueError(
            f"{folder} has {len(all_heads):,} rows of {len(firsts):,} different blocks, by their "
            f"content_hash: row {again[0] + 1} is there before, in the same split or the other; "
            "copy the folder again, or import it as it is with repeated=keep"
        )
    return num_replay


def open_table(file: Path, names: Sequence[str]) -> Any:
    """Opens a parquet file of the authors' code; a few bytes of it may stand for gigabytes.

    Raises:
        ValueError: it lacks a column, or has more values than blocks have.
    """
    import pyarrow.parquet as pq

    texts = [name for name in ("origin", "content_hash", "split") if name in names]
    there = pq.read_schema(file).names
    if lacking := [name for name in names if name not in there]:
        raise ValueError(
            f"{file} has no column {lacking[0]!r}, found {', '.join(there)}: name a folder that "
            "the authors' code wrote"
        )
    table = pq.ParquetFile(file, read_dictionary=texts)
    for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            is_text = column.path_in_schema in texts
            if column.num_values > _MOST_TOKENS * max(1, group.num_rows) or (
                is_text and column.total_uncompressed_size > _MOST_TEXTS
            ):
                raise ValueError(f"{file} has too much in column {column.path_in_schema}")
    return table


def _read(part: Path) -> Iterator[tuple[str, str, str, NDArray[np.int32], Hashes]]:
    """Yields runs of rows of one source and split: origin, role, split, tokens [N, S], hashes."""
    for columns in read_columns(part, "token_ids", "origin", "origin_tag", "content_hash", "split"):
        lists = columns["token_ids"]
        ids, lengths = lists.flatten(), np.diff(np.asarray(lists.offsets))
        if ids.null_count or len({*lengths.tolist()}) != 1 or lengths[0] < 2:
            raise ValueError(
                f"{part} has blocks of {lengths.min()} to {lengths.max()} tokens, or null among "
                "them: expected one length, from 2 on; copy it again"
            )
        tokens = ids.to_numpy()
        if tokens.min() < 0 or tokens.max() >= 1 << 31:
            raise ValueError(
                f"{part} has token ids from {tokens.min()} to {tokens.max()}, expected those of a "
                "tokenizer, from 0 on: copy it again"
            )
        tokens = tokens.astype(np.int32).reshape(len(lists), -1)
        hashes = as_bytes(columns["content_hash"].to_pylist())
        facts = (columns[name].to_pylist() for name in ("origin", "origin_tag", "split"))
        keys = [*zip(*facts, strict=True)]
        ends = [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
        for begin, end in zip([0, *ends], [*ends, len(keys)], strict=True):
            origin, tag, split = keys[begin]
            if tag not in (0, 1) or split not in SPLITS:
                raise ValueError(
                    f"{part} has a row of origin {origin!r}, origin_tag {tag!r} and split "
                    f"{split!r}: expected a text, 0 or 1, and train or holdout"
                )
            yield origin, ROLES[tag], split, tokens[begin:end], hashes[begin:end]
