"""The curriculum explorer: the pool of one step, and blocks of a source over any range of steps.

One static page, `curriculum.html`, with whole pools of some steps, counts and mean scores of all
candidates, and texts. Their number is bounded, so that the page of a long run opens on a phone.

Shape suffixes: C = all candidates of a part of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.lab import curriculum_tools
from nemo_rod.lab.curriculum_tools import CurriculumArrays
from nemo_rod.selection.curriculum.header import DIFFERENCE, CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum

MAX_RANGES = 12  # parts of the run that can be selected
MAX_BLOCKS = 800  # of all kinds in all parts
MAX_OF_A_KIND = 5  # chosen or dropped blocks of a source in one part of the run
MAX_POOLED = 2000  # candidates in all pools that are shown; a larger pool is shown alone
MAX_CHARACTERS = 300  # of a block's text

Texts = Callable[[str, Sequence[int]], list[str]]
Numbers = dict[str, Any]


def explore(path: Path, texts: Texts | None = None) -> dict[str, Any] | None:
    """Returns a curriculum's data for the page; None if it has no scored step.

    The curriculum may be of a run under way; `texts` gives those of blocks, by the digest of their
    store and their ids.

    Raises:
        ValueError: the file is not a curriculum, or the texts cannot be read.
    """
    with Curriculum.open(path, read_only=True) as curriculum:
        header, num_steps = curriculum.header, len(curriculum)
        if not header.scored or num_steps == 0:
            return None
        kinds = 2 * min(MAX_RANGES, num_steps) * len(header.sources)
        some = max(1, min(MAX_OF_A_KIND, MAX_BLOCKS // kinds))
        arrays = curriculum_tools.arrays(curriculum)
        ranges: list[list[int]] = []
        cells: list[Numbers] = []
        for part in np.array_split(np.arange(num_steps), min(MAX_RANGES, num_steps)):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            cells += _cells(header, arrays, rows, part=len(ranges), some=some)
            ranges.append([int(arrays.step[rows.start]), int(arrays.step[rows.stop - 1])])
        num_pools = min(num_steps, max(1, MAX_POOLED // header.num_candidates))
        shown = np.linspace(0, num_steps - 1, num_pools).round().astype(int)
        pools: list[Numbers] = []
        for row in shown.tolist():  # a step's scored candidates, best first
            source_C, tau = header.source_index(arrays.block_ids[row]), float(arrays.threshold[row])
            order_C = np.argsort(-arrays.score[row], kind="stable")
            scored = order_C[(np.isfinite(arrays.score[row]) & (source_C >= 0))[order_C]]
            candidates = [  # each with its source, and whether it was chosen
                [*_block(header, arrays, row, i), int(source_C[i]), int(arrays.chosen[row, i])]
                for i in scored.tolist()
            ]
            known = round(tau, 4) if math.isfinite(tau) else None
            pools.append({"step": int(arrays.step[row]), "tau": known, "candidates": candidates})
    groups = [cell[kind]["blocks"] for cell in cells for kind in ("chosen", "dropped")]
    groups += [pool["candidates"] for pool in pools]
    ids = sorted({block[1] for group in groups for block in group})
    by_id = dict(zip(ids, texts(header.store, ids), strict=True)) if texts else {}
    for number, text in by_id.items():
        if len(text) > MAX_CHARACTERS:
            by_id[number] = text[: MAX_CHARACTERS - 1] + "\u2026"
    return {
        "sources": [[row.role, row.name] for row in header.sources],
        "ranges": ranges,
        "cells": cells,
        "pools": pools,
        "texts": by_id,
    }


def _block(
    header: CurriculumHeader, arrays: CurriculumArrays, row: int, place: int
) -> list[float | int | None]:
    """Returns step, id, loss, reference and score; null for a loss that is not recorded."""
    loss, score = float(arrays.loss[row, place]), float(arrays.score[row, place])
    is_known, is_difference = math.isfinite(loss), header.score == DIFFERENCE
    return [
        int(arrays.step[row]),
        int(arrays.block_ids[row, place]),
        round(loss, 4) if is_known else None,
        round(loss - score, 4) if is_known and is_difference else None,
        round(score, 4),
    ]


def _cells(
    header: CurriculumHeader, arrays: CurriculumArrays, rows: slice, *, part: int, some: int
) -> Iterator[Numbers]:
    """Yields counts, sums and some blocks of every source that has candidates in these steps."""
    columns: tuple[Any, ...] = (arrays.block_ids, arrays.score, arrays.chosen)
    id_C, score_C, chosen_C = (np.ravel(column[rows]) for column in columns)
    source_C = header.source_index(id_C)

    def block(place: int) -> list[float | int | None]:
        row, candidate = divmod(int(place), header.num_candidates)
        return _block(header, arrays, rows.start + row, candidate)

    def kind(places: npt.NDArray[np.int64]) -> Numbers:
        """Returns a kind's count, sum of scores, and some blocks, evenly from best to worst."""
        shown = np.unique(np.linspace(0, len(places) - 1, some).round().astype(int))
        return {
            "count": len(places),
            "total": round(float(score_C[places].sum(dtype=np.float64)), 4),
            "blocks": [block(place) for place in places[shown]] if len(places) else [],
        }

    scored = np.flatnonzero(np.isfinite(score_C) & (source_C >= 0))
    scored = scored[np.lexsort((-score_C[scored], source_C[scored]))]  # by source, best first
    ends = np.searchsorted(source_C[scored], np.arange(len(header.sources)), side="right")
    for source, mine in enumerate(np.split(scored, ends[:-1])):
        if len(mine):
            won, lost = mine[chosen_C[mine]], mine[~chosen_C[mine]]
            yield {"source": source, "range": part, "chosen": kind(won), "dropped": kind(lost)}
