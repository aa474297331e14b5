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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.hashing import block_hashes
from nemo_rod.corpus.shards import BLOCKS_PER_SHARD, SCHEMA, SplitWriter
from nemo_rod.corpus.store import SPLITS, BlockStore
from nemo_rod.corpus.tokenizer import Tokenizer
from nemo_rod.files import check_name, interpreting, write_json
from nemo_rod.roles import ROLES

HASHES = "content_hash.npy"
_COLUMNS = ("token_ids", "origin", "origin_tag", "content_hash", "split")
_ROWS = 256  # at a time, 8 MB of their int64
_MOST_TOKENS, _MOST_TEXTS = 1 << 20, 1 << 28  # of a block on average; bytes of a column of texts


def content_hash(origin: str, tokens: NDArray[np.int32]) -> bytes:
    """Returns the authors' hash of a block: sha256 of its origin and tokens as compact JSON."""
    name = json.dumps(origin, ensure_ascii=False)
    text = f'{{"origin":{name},"token_ids":[{",".join(map(str, tokens.tolist()))}]}}'
    return hashlib.sha256(text.encode()).digest()


def content_hashes(store: BlockStore, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns the authors' hashes of blocks of a store, uint8 [C, 32].

    Those of an imported store are in its table; for any other, the name of a source is its origin.
    """
    if store.split == "train" and (store.root / HASHES).is_file():
        hashes: NDArray[np.uint8] = np.load(store.root / HASHES, mmap_mode="r")[block_ids]
        return hashes
    names = [store.sources[index].name for index in store.source_index(block_ids)]
    rows = zip(names, store.checked_tokens(block_ids), strict=True)
    joined = b"".join(content_hash(name, tokens) for name, tokens in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 32)


class _Rows(NamedTuple):
    """Consecutive rows of one source and split."""

    origin: str
    role: str
    split: str
    tokens: NDArray[np.int32]  # [N, S]
    hashes: NDArray[np.uint8]  # the authors', [N, 32]


@dataclass
class _Source:
    """A source on its way into the store: its writers by split."""

    writers: dict[str, SplitWriter]
    hashes: list[NDArray[np.uint8]] = field(default_factory=list)  # the authors', of training


def import_blocks(
    folder: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    block_size: int | None = None,
    pool_share: float = 1.0,
    check_every: int = 64,
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
        check_every: one of so many blocks is compared with its content hash; 1 compares all, which
            takes four times as long.
        progress: called with the number of blocks done.

    Raises:
        ValueError: a part is missing or has other columns, or a row does not fit its hash, the
            tokenizer or the other rows; nothing is left of the store.
    """
    parts = _parts(folder)
    if out.exists():
        raise ValueError(f"{out} exists: choose a new folder, or remove it")
    work = out.with_name(f"{out.name}.importing")
    shutil.rmtree(work, ignore_errors=True)
    sources: dict[tuple[str, str], _Source] = {}
    done = seen = 0
    is_drawn = None
    if pool_share < 1.0:  # the rows of replay, of both splits and in order, that their run draws
        import pyarrow.parquet as pq

        tags = (np.asarray(pq.read_table(p, columns=["origin_tag"])["origin_tag"]) for p in parts)
        is_drawn = np.zeros(sum(int((tag == 1).sum()) for tag in tags), dtype=bool)
        drawn = random.Random(42).sample(range(len(is_drawn)), round(len(is_drawn) * pool_share))
        is_drawn[drawn] = True
    try:
        for rows in (rows for part in parts for rows in _read(part)):
            block_size = block_size or rows.tokens.shape[1]
            _check(rows, folder, block_size, tokenizer, done, check_every, sources)
            target = work / rows.role / rows.origin
            if (key := (rows.role, rows.origin)) not in sources:
                places = zip(SPLITS, (target, target / "holdout"), strict=True)
                known = {"block_size": block_size, "blocks_per_shard": BLOCKS_PER_SHARD}
                sources[key] = _Source({s: SplitWriter(p, known) for s, p in places})
            done += len(rows.tokens)
            if is_drawn is not None and rows.role == "replay":
                kept = is_drawn[seen : seen + len(rows.tokens)] | (rows.split == "holdout")
                seen += len(rows.tokens)
                rows = rows._replace(tokens=rows.tokens[kept], hashes=rows.hashes[kept])
            hashes = block_hashes(rows.origin, rows.tokens)
            sources[key].writers[rows.split].append(rows.tokens, hashes)
            if rows.split == "train":
                sources[key].hashes.append(rows.hashes)
            progress(done)
        assert block_size is not None, "a part has a row"
        _finish(work, folder, sources, parts, block_size, tokenizer, pool_share)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return BlockStore(out)


def _parts(folder: Path) -> list[Path]:
    """Returns the parts of a folder, in order; refuses one with a gap."""
    parts = sorted(folder.glob("part_*.parquet"))
    numbers = [int(found[1]) for p in parts if (found := re.fullmatch(r"part_(\d+)", p.stem))]
    if not numbers:
        raise ValueError(
            f"{folder} has no part_00000.parquet: name the folder of blocks that the authors' "
            "code wrote"
        )
    if missing := sorted({*range(max(numbers) + 1)} - {*numbers}):
        raise ValueError(
            f"{folder} lacks part_{missing[0]:05d}.parquet, but has part_{max(numbers):05d}"
            ".parquet: copy the folder again"
        )
    return parts


def open_table(file: Path, names: Sequence[str]) -> Any:
    """Opens a parquet file of the authors' code; a few bytes of it may stand for gigabytes.

    Raises:
        ValueError: it lacks a column, or has more values than blocks have.
    """
    import pyarrow.parquet as pq

    texts = [name for name in ("origin", "content_hash", "split") if name in names]
    table = pq.ParquetFile(file, read_dictionary=texts)
    there = table.schema_arrow.names
    if lacking := [name for name in names if name not in there]:
        raise ValueError(
            f"{file} has no column {lacking[0]!r}, found {', '.join(there)}: name a folder that "
            "the authors' code wrote"
        )
    for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            is_text = column.path_in_schema in texts
            if column.num_values > _MOST_TOKENS * max(1, group.num_rows) or (
                is_text and column.total_uncompressed_size > _MOST_TEXTS
            ):
                raise ValueError(f"{file} has too much in column {column.path_in_schema}")
    return table


def short_texts(batch: Any, name: str) -> list[Any]:
    """Returns the values of a column; each text of a dictionary may be there any number of times.

    Raises:
        ValueError: a text is longer than any name or hash.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = batch.column(name)
    words = column.dictionary if pa.types.is_dictionary(column.type) else column[:0]
    if len(words) and (longest := pc.max(pc.binary_length(words)).as_py()) > 1 << 12:
        raise ValueError(f"column {name} has a text of {longest:,} bytes")
    values: list[Any] = column.to_pylist()
    return values


def _read(part: Path) -> Iterator[_Rows]:
    """Yields runs of rows of one source and split."""
    with interpreting(part, cure="copy it again"), open_table(part, _COLUMNS) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=[*_COLUMNS]):
            columns = [short_texts(batch, name) for name in _COLUMNS[1:]]
            # one list of the same length per row, checked by the lengths of all
            lists = batch.column("token_ids")
            lengths = np.diff(np.asarray(lists.offsets))
            if lists.null_count or len({*lengths.tolist()}) != 1:
                raise ValueError(f"{part} has blocks of different lengths: copy it again")
            ids = np.asarray(lists.flatten())
            if ids.min() < 0 or ids.max() >= 1 << 31:
                raise ValueError(f"{part} has the token id {ids.min()} or {ids.max()}")
            tokens = ids.astype(np.int32).reshape(len(lists), -1)
            keys = list(zip(columns[0], columns[1], columns[3], strict=True))
            ends = [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]]
            for begin, end in zip([0, *ends], [*ends, len(keys)], strict=True):
                origin, tag, split = keys[begin]
                if tag not in (0, 1) or split not in SPLITS or not isinstance(origin, str):
                    raise ValueError(
                        f"{part} has a row of origin {origin!r}, origin_tag {tag!r} and split "
                        f"{split!r}: expected a text, 0 or 1, and train or holdout"
                    )
                joined = bytes.fromhex("".join(columns[2][begin:end]))
                hashes = np.frombuffer(joined, dtype=np.uint8).reshape(end - begin, 32)
                yield _Rows(origin, ROLES[tag], split, tokens[begin:end], hashes)


def _check(
    rows: _Rows,
    folder: Path,
    block_size: int,
    tokenizer: Tokenizer,
    done: int,
    check_every: int,
    sources: dict[tuple[str, str], _Source],
) -> None:
    """Refuses rows that belong to no store together with those before them."""
    check_name("source", rows.origin)
    other = ROLES[1 - ROLES.index(rows.role)]
    if (other, rows.origin) in sources:
        raise ValueError(
            f"{folder} has blocks of origin {rows.origin} in both roles: names of sources must "
            "differ, rename one of them in the authors' corpus"
        )
    if rows.tokens.shape[1] != block_size:
        raise ValueError(
            f"{folder} has a block of {rows.tokens.shape[1]} tokens, expected {block_size} as the "
            "first one, or domain.block_size of the recipe: import one block size at a time"
        )
    if (largest := int(rows.tokens.max())) >= tokenizer.vocab_size:
        raise ValueError(
            f"{folder} has the token id {largest} in origin {rows.origin}, but the tokenizer has "
            f"{tokenizer.vocab_size} ids: name the one that made the blocks"
        )
    for row in range(-done % check_every, len(rows.tokens), check_every):
        if content_hash(rows.origin, rows.tokens[row]) != rows.hashes[row].tobytes():
            raise ValueError(
                f"{folder}: row {done + row}, of origin {rows.origin}, has the content_hash "
                f"{rows.hashes[row].tobytes().hex()} of other tokens: copy the folder again"
            )


def _finish(
    work: Path,
    folder: Path,
    sources: dict[tuple[str, str], _Source],
    parts: list[Path],
    block_size: int,
    tokenizer: Tokenizer,
    pool_share: float,
) -> None:
    """Writes the manifests, the table of hashes and the list of sources."""
    order = sorted(sources, key=lambda key: (ROLES.index(key[0]), key[1]))
    for role, name in order:
        writers = sources[role, name].writers
        counts = {split: writer.count for split, writer in writers.items()}
        if not counts["train"]:
            raise ValueError(f"{folder} has no block to train on of origin {name}: copy it again")
        total = sum(counts.values())
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "source": name,
            "role": role,
            "block_size": block_size,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "holdout": {"fraction": counts["holdout"] / total, "seed": 42, "unit": "block"},
            "holdout_floor": None,
            "replay_ratio": None,
            "reading": {"kind": "authors"} | ({"pool_share": pool_share} if pool_share < 1 else {}),
            "files": [{"name": p.name, "bytes": p.stat().st_size, "documents": 0} for p in parts],
            "documents": 0,  # they are not counted
            "tokens": total * block_size,
            "dropped_tokens": 0,
        }
        for split, writer in writers.items():
            writer.finish({**manifest, "split": split})
    table = [part for key in order for part in sources[key].hashes]
    np.save(work / HASHES, np.concatenate(table))
    names = [{"role": role, "name": name} for role, name in order]
    write_json(work / "store.json", {"schema": SCHEMA, "sources": names})
