"""A recorded curriculum as a data set: its blocks in the order of training, for any trainer.

    <out>/part-00000.parquet ...   for `datasets` and all that read parquet
    <out>/__megatron__/blocks.bin, blocks.idx  for Megatron: one block per sequence and document
    <out>/order-00000.parquet ...  beside them, the other columns, row by row
    <out>/.manifest.json           written last; readers of folders pass such names by

Rows are ordered by step and, within a step, by the place in its batch. A part is renamed into place
whole, and a repeated call continues after the last one; memory does not grow with the curriculum.

Shape suffixes: K = blocks of a step, S = tokens per block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.corpus.shards import index_bytes
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import digest, open_file, read_json, replacing, sync, write_json, write_whole
from nemo_rod.lab.curriculum_tools import verify
from nemo_rod.selection.curriculum.log import Curriculum

_MANIFEST, _INPUTS = ".manifest.json", ".inputs.json"
PART_TOKENS = 1 << 27  # half a GB, which an interruption costs at most


def materialise(
    curriculum: Curriculum,
    store: BlockStore,
    out: Path,
    *,
    format: str,
    part_tokens: int = PART_TOKENS,
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Writes the blocks that a run trained on, in the order of training.

    Columns: `step`; `position` in the batch; `block_id`; `hash`, of the block, in hex; `source`;
    `role`; `score` and `loss`, float32, nats per token, null where the run did not score; and
    `input_ids`, int32 [S]. Every block is compared with its hash.

    Args:
        curriculum: the recorded curriculum.
        store: the store that it was recorded with.
        out: folder to write; a folder of an interrupted call is continued.
        format: one of `curricula.FORMATS`.
        part_tokens: tokens per part, at most, but one step at least.
        progress: called with the number of steps done.

    Raises:
        ValueError: the store or the folder is of another curriculum or damaged.
    """
    header = curriculum.header
    if not len(curriculum):
        raise ValueError(f"{curriculum.path} holds no step: materialise a run that has trained")
    verify(curriculum, store)
    made_of = {
        "format": format,
        "steps": len(curriculum),
        "blocks_per_step": header.num_chosen,
        **{key: getattr(store, key) for key in ("eod_id", "vocab_size")},
        **{
            key: getattr(header, key)
            for key in ("first_step", "block_size", "tokenizer", "store", "config", "seed")
        },
        "last_step": digest(curriculum[-1].block_ids.tobytes()),
        "part_tokens": part_tokens,
    }
    _claim(out, made_of)
    binary = out / "__megatron__" / "blocks.bin" if format == "megatron" else None
    of_a_step = header.num_chosen * header.block_size  # tokens
    steps = max(1, part_tokens // of_a_step)
    starts = range(0, len(curriculum), steps)
    name = "part-{:05d}.parquet" if binary is None else "order-{:05d}.parquet"
    there = binary.stat().st_size if binary is not None and binary.exists() else 0
    parts = [out / name.format(number) for number in range(len(starts))]
    stops = [min(start + steps, len(curriculum)) for start in starts]
    whole = [
        part.exists() and (binary is None or there >= 4 * stop * of_a_step)
        for part, stop in zip(parts, stops, strict=True)
    ]
    if (out / _MANIFEST).exists():
        if all(whole) and (binary is None or binary.with_suffix(".idx").exists()):
            return
        write_json(out / _INPUTS, made_of)  # a file was removed: the folder is no longer whole
        (out / _MANIFEST).unlink()
    for number, (path, start, stop) in enumerate(zip(parts, starts, stops, strict=True)):
        if number >= [*whole, False].index(False):  # parts after a missing one are written again
            rows = (_rows(curriculum, store, i) for i in range(start, stop))
            _write(path, _without_tokens(rows, binary, 4 * start * of_a_step) if binary else rows)
        progress(stop)
    if binary is not None:
        count, rest = divmod(binary.stat().st_size, 4 * header.block_size)
        assert not rest, "whole blocks"
        write_whole(binary.with_suffix(".idx"), index_bytes(count, header.block_size))
    write_json(out / _MANIFEST, made_of)
    (out / _INPUTS).unlink()


def _claim(out: Path, made_of: dict[str, Any]) -> None:
    """Takes a folder for a curriculum, or continues in one; refuses any other content."""
    if file := next((path for path in (out, *out.parents) if path.is_file()), None):
        raise ValueError(f"{file} is a file: choose a new folder, or remove it")
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    for name in (_MANIFEST, _INPUTS):
        if name in names:
            recorded = read_json(out / name)
            for key in [*made_of, *recorded]:
                if (old := recorded.get(key)) != (new := made_of.get(key)):
                    raise ValueError(
                        f"{out} was materialised with {key}={old}, but now it is {new}: choose "
                        "another folder, or remove it"
                    )
            return
    if names:
        raise ValueError(
            f"{out} holds other files, {min(names)} among them: choose a new folder, or remove it"
        )
    write_json(out / _INPUTS, made_of)


def _rows(curriculum: Curriculum, store: BlockStore, index: int) -> Any:
    """Returns the rows of one step as an Arrow table [K]."""
    import pyarrow as pa

    record, sources = curriculum[index], curriculum.header.sources
    ids_K = record.trained_on
    source_K = [sources[i] for i in curriculum.header.source_index(ids_K)]
    offsets = np.arange(len(ids_K) + 1, dtype=np.int32) * store.block_size
    tokens = store.checked_tokens(ids_K).reshape(-1)
    columns = {
        "step": pa.array(np.full(len(ids_K), record.step, dtype=np.int64)),
        "position": pa.array(np.arange(len(ids_K), dtype=np.int32)),
        "block_id": pa.array(ids_K),
        "hash": pa.array([row.tobytes().hex() for row in store.hashes(ids_K)]),
        "source": pa.array([source.name for source in source_K]),
        "role": pa.array([source.role for source in source_K]),
        "score": pa.array(record.score[record.chosen], from_pandas=True),
        "loss": pa.array(record.loss[record.chosen], from_pandas=True),
        "input_ids": pa.ListArray.from_arrays(offsets, tokens),
    }
    return pa.table(columns)


def _write(path: Path, tables: Iterator[Any]) -> None:
    """Writes a part, with one row group per step."""
    import pyarrow.parquet as pq

    first = next(tables)
    with replacing(path) as file, pq.ParquetWriter(file, first.schema, compression="zstd") as part:
        part.write_table(first)
        for table in tables:
            part.write_table(table)


def _without_tokens(tables: Iterator[Any], binary: Path, start: int) -> Iterator[Any]:
    """Yields the other columns of steps, whose tokens go to Megatron's file, from a byte on."""
    binary.parent.mkdir(exist_ok=True)
    with open_file(binary, os.O_RDWR | os.O_CREAT) as file:
        file.truncate(start)  # what an interrupted call left
        file.seek(0, os.SEEK_END)
        for table in tables:
            tokens = table["input_ids"].combine_chunks().flatten().to_numpy()
            file.write(np.ascontiguousarray(tokens, dtype="<i4").data)
            yield table.drop_columns("input_ids")
    sync(binary)  # the part, which is not yet in place, promises these blocks
