"""The authors' cache of reference losses as a folder of references.

    refloss_train_<12 hex>.parquet   content_hash, origin, origin_tag, ref_loss, n_response_tokens

One folder holds both roles, perhaps several models, and names none: the caller does. Their passes
drop a last partial batch, so some blocks may have no loss; a run that draws one is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.store import BlockStore
from nemo_rod.lab.authors.blocks import as_bytes, read_columns
from nemo_rod.lab.authors.trace import Table
from nemo_rod.selection.references.folder import ReferenceWriter, role_manifest

_COLUMNS = ("content_hash", "origin_tag", "ref_loss", "n_response_tokens")
_ROWS = 1 << 16  # blocks at a time


def import_references(
    cache: Path, store: BlockStore, out: Path, *, role: str, model: str, precision: str
) -> int:
    """Writes the losses of a cache for the training blocks of one role.

    `cache` is their folder of refloss_train_*.parquet, `model` the digest of the weights that
    scored.

    Returns:
        Number of blocks with a loss.

    Raises:
        ValueError: there is no cache, it is of other blocks or of two models, or it has a loss that
            is not finite; nothing is written.
    """
    if out.exists():
        raise ValueError(f"{out} exists: choose a new folder, or remove it")
    manifest = role_manifest(
        store, role, model=model, lengths=(store.block_size,), precision=precision
    )
    losses = np.full(manifest.num_blocks, np.nan, dtype=np.float32)
    files = sorted(cache.glob("refloss_train_*.parquet"))
    if not files:
        raise ValueError(
            f"{cache} has no refloss_train_*.parquet: name the ref_loss_cache_path of the run"
        )
    table, tag = Table(store), int(role == "replay")
    for file in files:
        for ids, values in _read(file, tag, table, store.block_size):
            rows = ids - manifest.start
            outside = (rows < 0) | (rows >= len(losses))
            if outside.any():
                raise ValueError(
                    f"{file} has block {ids[outside][0]} as {role}, which the store has in the "
                    "other role: import the blocks and the losses of one corpus"
                )
            before = losses[rows]
            known = ~np.isnan(before)
            losses[rows] = values
            # also within these rows: the value that was written last is not that of another row
            differ = (known & (before != values)) | (losses[rows] != values)
            if differ.any():
                raise ValueError(
                    f"{file} has another loss of block {ids[differ][0]} than an earlier row: the "
                    "cache holds the losses of two models, so copy the files of one of them"
                )
    present = ~np.isnan(losses)
    if not present.any():
        raise ValueError(f"{cache} has no loss of the {role} blocks: name the cache of that role")
    work = out.with_name(f"{out.name}.importing")
    shutil.rmtree(work, ignore_errors=True)
    try:
        writer = ReferenceWriter(work, manifest, store.hashes, present)
        while len(ids := writer.missing[:_ROWS]):
            writer.append(ids, losses[ids - manifest.start][:, None])
        writer.close()
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return int(present.sum())


def _read(
    file: Path, tag: int, table: Table, block_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yields block ids and losses of one role."""
    for columns in read_columns(file, *_COLUMNS, rows=_ROWS):
        mine = columns["origin_tag"].to_numpy() == tag
        if not mine.any():
            continue
        targets = columns["n_response_tokens"].to_numpy()[mine]
        if (targets != block_size - 1).any():
            raise ValueError(
                f"{file} has losses over {targets[targets != block_size - 1][0]} targets, "
                f"expected {block_size - 1} of a whole block: name the cache of these blocks"
            )
        losses = columns["ref_loss"].to_numpy()[mine].astype(np.float32)
        hashes = as_bytes(columns["content_hash"].to_pylist())[mine]
        is_loss = np.isfinite(losses) & (losses >= 0)
        if not is_loss.all():
            place = int(np.argmin(is_loss))
            raise ValueError(
                f"{file} has the loss {losses[place]} of block {hashes[place].tobytes().hex()}: "
                "score that block again"
            )
        yield table.find(hashes, str(file)), losses
