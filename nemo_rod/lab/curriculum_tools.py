"""Tools for curricula: read one whole, export it to parquet, verify it, compare two.

Shape suffixes: N = steps, C = candidates, K = chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_rod.files import replacing
from nemo_rod.selection.arrays import Ids, Mask, Nats
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.curriculum.header import DIFFERENCE, refuse_other_store
from nemo_rod.selection.curriculum.log import PADDING_ID, Curriculum

_EXPORT_ROWS = 1 << 18


@dataclass(frozen=True)
class CurriculumDiff:
    """How two curricula differ, over the N steps that both have."""

    step: Ids
    overlap: npt.NDArray[np.float64]  # blocks trained on in both, as a fraction of the larger set
    replay_share_a: npt.NDArray[np.float64]  # share of the batches of the first
    replay_share_b: npt.NDArray[np.float64]  # share of the batches of the second
    same_pools: Mask  # whether both drew the same candidates


@dataclass(frozen=True)
class CurriculumArrays:
    """Several steps: the fields of `StepRecord` with a leading N, but `chosen` is bool [N, C].

    All arrays except `chosen` are read-only views of the file.
    """

    step: Ids
    block_ids: Ids
    loss: Nats
    score: Nats
    chosen: Mask
    threshold: npt.NDArray[np.float64]


def arrays(curriculum: Curriculum, rows: slice = slice(None)) -> CurriculumArrays:
    """Returns all steps at once, or some rows of them."""
    records_N, count = curriculum.records()[rows], curriculum.header.num_candidates
    bits = np.unpackbits(records_N["chosen"], axis=1, count=count, bitorder="little")
    return CurriculumArrays(
        step=records_N["step"].view(np.int64),
        block_ids=records_N["block_ids"],
        loss=records_N["loss"],
        score=records_N["score"],
        chosen=bits.astype(bool),
        threshold=records_N["threshold"],
    )


def export(curriculum: Curriculum, path: str | Path) -> None:
    """Writes a curriculum as parquet, one row per candidate; renamed into place atomically.

    The reference is loss - score, up to the last bit or two, and null for another score than
    `reducible_loss`. Unscored values are null, as are role and source of padding.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, header, count = Path(path), curriculum.header, curriculum.header.num_candidates
    names = np.array([row.name for row in header.sources] + [None], dtype=object)
    roles = np.array([row.role for row in header.sources] + [None], dtype=object)
    word = pa.dictionary(pa.int32(), pa.string())
    types = {"step": pa.int64(), "position": pa.int32(), "block_id": pa.int64()}
    types |= {"role": word, "source": word}
    types |= dict.fromkeys(("score", "loss", "reference"), pa.float32())
    schema = pa.schema(types | {"chosen": pa.bool_(), "threshold": pa.float64()})
    steps = max(1, _EXPORT_ROWS // count)
    with replacing(path) as file, pq.ParquetWriter(file, schema) as writer:
        for first in range(0, len(curriculum), steps):
            piece = arrays(curriculum, slice(first, first + steps))
            ids, loss, score = (
                each.reshape(-1) for each in (piece.block_ids, piece.loss, piece.score)
            )
            with np.errstate(invalid="ignore"):
                reference = np.where(np.isneginf(score), np.nan, loss - score)
            # neither estimated scores nor those of another function are differences of losses
            estimated = np.repeat(np.isnan(piece.loss).any(axis=1), count)
            reference[estimated | (header.score != DIFFERENCE)] = np.nan
            source = header.source_index(ids)
            columns = {
                "step": np.repeat(piece.step, count),
                "position": np.tile(np.arange(count, dtype=np.int32), len(piece.step)),
                "block_id": ids,
                "role": roles[source],
                "source": names[source],
                "score": score,
                "loss": loss,
                "reference": reference.astype(np.float32),
                "chosen": piece.chosen.reshape(-1),
                "threshold": np.repeat(piece.threshold, count),
            }
            table = [pa.array(columns[f.name], f.type, from_pandas=True) for f in schema]
            writer.write_table(pa.table(table, schema=schema))


def verify(curriculum: Curriculum, store: Blocks) -> None:
    """Checks that a curriculum belongs to a store and is consistent.

    Raises:
        ValueError: the store, tokenizer or block size differs; a block id is not in the store; the
            number of chosen blocks is not the header's; or padding was chosen.
    """
    header = curriculum.header
    refuse_other_store(curriculum.path, header, store)
    for record in curriculum:
        ids = record.block_ids
        outside = ids[(ids != PADDING_ID) & ((ids < 0) | (ids >= len(store)))]
        if outside.size:
            raise ValueError(
                f"{curriculum.path}, step {record.step}: block {outside[0]} is not in the store of "
                f"{len(store)} blocks: the file is damaged, restore it from a copy"
            )
        if len(record.chosen) != header.num_chosen or (ids[record.chosen] == PADDING_ID).any():
            raise ValueError(
                f"{curriculum.path}, step {record.step}: {len(record.chosen)} blocks were chosen, "
                f"expected {header.num_chosen} and no padding: the file is damaged, restore it "
                "from a copy"
            )


def diff(a: Curriculum, b: Curriculum) -> CurriculumDiff:
    """Compares, step by step, the blocks that two runs on the same store trained on.

    Raises:
        ValueError: the runs used different stores, or have no step in common.
    """
    if a.header.store != b.header.store:
        raise ValueError(
            f"{a.path} is of block store {a.header.store!r} and {b.path} of {b.header.store!r}: "
            "block ids can be compared within one store only"
        )
    steps = range(max(a.header.first_step, b.header.first_step), min(a.next_step, b.next_step))
    if not steps:
        raise ValueError(f"{a.path} and {b.path} have no step in common: compare runs that overlap")
    rows = []
    for step in steps:
        row_a, row_b = a[step - a.header.first_step], b[step - b.header.first_step]
        set_a, set_b = np.unique(row_a.trained_on), np.unique(row_b.trained_on)
        shared = len(np.intersect1d(set_a, set_b, assume_unique=True))
        shares = [a.header.is_replay(row.trained_on).mean() for row in (row_a, row_b)]
        same_pool = np.array_equal(row_a.block_ids, row_b.block_ids)
        rows.append((shared / max(len(set_a), len(set_b)), *shares, same_pool))
    overlap, share_a, share_b, same = (np.array(column) for column in zip(*rows, strict=True))
    return CurriculumDiff(np.array(steps), overlap, share_a, share_b, same)
