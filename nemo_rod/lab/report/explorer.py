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
from nemo_rod.lab.history import history_of
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
        history = history_of(curriculum, bins=MAX_RANGES)
        ranges, cells = list[list[int]](), list[Numbers]()
        for part, rows in enumerate(history.bins):
            piece = curriculum_tools.arrays(curriculum, rows)
            for cell in _cells(header, piece, some):
                for won, kind in enumerate(("dropped", "chosen")):
                    at = (part, cell["source"], won)
                    cell[kind] |= {"count": int(history.scored_BOW[at])}
                    cell[kind] |= {"total": round(float(history.score_BOW[at]), 4)}
                cells.append(cell | {"range": part})
            ranges.append([int(history.step_T[rows.start]), int(history.step_T[rows.stop - 1])])
        num_pools = min(num_steps, max(1, MAX_POOLED // header.num_candidates))
        shown = np.linspace(0, num_steps - 1, num_pools).round().astype(int)
        pools: list[Numbers] = []
        for row in shown.tolist():  # a step's scored candidates, best first
            one = curriculum_tools.arrays(curriculum, slice(row, row + 1))
            source_C, tau = header.source_index(one.block_ids[0]), float(one.threshold[0])
            order_C = np.argsort(-one.score[0], kind="stable")
            scored = order_C[(np.isfinite(one.score[0]) & (source_C >= 0))[order_C]]
            candidates = [  # each with its source, and whether it was chosen
                [*_block(header, one, 0, i), int(source_C[i]), int(one.chosen[0, i])]
                for i in scored.tolist()
            ]
            known = round(tau, 4) if math.isfinite(tau) else None
            pools.append({"step": int(one.step[0]), "tau": known, "candidates": candidates})
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


def _cells(header: CurriculumHeader, arrays: CurriculumArrays, some: int) -> Iterator[Numbers]:
    """Yields some blocks, evenly from best to worst, of every source with candidates here."""
    score_C, chosen_C = np.ravel(arrays.score), np.ravel(arrays.chosen)
    source_C = header.source_index(np.ravel(arrays.block_ids))

    def kind(places: npt.NDArray[np.int64]) -> Numbers:
        shown = np.unique(np.linspace(0, len(places) - 1, some).round().astype(int))
        found = [divmod(int(p), header.num_candidates) for p in places[shown[: len(places)]]]
        return {"blocks": [_block(header, arrays, row, place) for row, place in found]}

    scored = np.flatnonzero(np.isfinite(score_C) & (source_C >= 0))
    scored = scored[np.lexsort((-score_C[scored], source_C[scored]))]  # by source, best first
    ends = np.searchsorted(source_C[scored], np.arange(len(header.sources)), side="right")
    for source, mine in enumerate(np.split(scored, ends[:-1])):
        if len(mine):
            won, lost = mine[chosen_C[mine]], mine[~chosen_C[mine]]
            yield {"source": source, "chosen": kind(won), "dropped": kind(lost)}
