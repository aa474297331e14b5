"""The curriculum explorer: chosen and dropped blocks of a source over any range of steps.

One static page, `curriculum.html`, with counts and mean scores of all candidates, and texts of
some. Their number is bounded, so that the page of a long run opens on a phone.

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
from nemo_rod.lab.report.page import render
from nemo_rod.selection.curriculum.header import DIFFERENCE, CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum

MAX_RANGES = 12  # parts of the run that can be selected
MAX_BLOCKS = 1200  # blocks with their text on the page
MAX_OF_A_KIND = 5  # chosen or dropped blocks of a source in one part of the run
MAX_CHARACTERS = 400  # of a block's text
NUM_BINS = 40  # of a histogram of scores

Texts = Callable[[str, Sequence[int]], list[str]]
Numbers = dict[str, Any]


def explore(path: Path, texts: Texts | None = None) -> dict[str, Any] | None:
    """Returns a curriculum's data for the page; None if it has no scored step.

    Args:
        path: `curriculum.rod`, also of a run under way.
        texts: Returns the texts of blocks, given the digest of their store and their ids; None for
            no texts.

    Raises:
        ValueError: If the file is not a curriculum, or the texts cannot be read.
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
        pools: list[Numbers] = []
        for part in np.array_split(np.arange(num_steps), min(MAX_RANGES, num_steps)):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            cells += _cells(header, arrays, rows, part=len(ranges), some=some)
            pools.append(_pool(header, arrays, int(part[0])))
            ranges.append([int(arrays.step[rows.start]), int(arrays.step[rows.stop - 1])])
    groups = [cell[kind] for cell in cells for kind in ("chosen", "dropped")]
    ids = sorted({block[1] for group in groups for block in group["blocks"]})
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


def _pool(header: CurriculumHeader, arrays: CurriculumArrays, place: int) -> Numbers:
    """Returns one step's whole pool as a histogram of scores by role, with tau."""
    score_C = np.asarray(arrays.score[place], dtype=np.float64)
    source_C = header.source_index(arrays.block_ids[place])
    is_scored_C = np.isfinite(score_C) & (source_C >= 0)
    tau = float(arrays.threshold[place])
    known = score_C[is_scored_C]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    counts = {}
    for role in ("adaptation", "replay"):
        is_role_O = np.array([row.role == role for row in header.sources])
        scores = score_C[is_scored_C & is_role_O[source_C]]
        counts[role] = np.histogram(scores, NUM_BINS, (low, max(high, low + 1e-6)))[0].tolist()
    return {
        "step": int(arrays.step[place]), "low": round(low, 4), "high": round(high, 4),
        "tau": round(tau, 4) if math.isfinite(tau) else None, **counts,
    }  # fmt: skip


def _cells(
    header: CurriculumHeader, arrays: CurriculumArrays, rows: slice, *, part: int, some: int
) -> Iterator[Numbers]:
    """Yields counts, sums and some blocks of every source that has candidates in these steps."""
    columns: tuple[Any, ...] = (arrays.block_ids, arrays.loss, arrays.score, arrays.chosen)
    id_C, loss_C, score_C, chosen_C = (np.ravel(column[rows]) for column in columns)
    step_C = np.repeat(arrays.step[rows], arrays.block_ids.shape[1])
    source_C = header.source_index(id_C)

    def block(place: int) -> list[float | int | None]:
        """Returns step, id, loss, reference and score; null for a loss that is not recorded."""
        loss, score = float(loss_C[place]), float(score_C[place])
        numbers: list[int | float | None] = [int(step_C[place]), int(id_C[place]), None, None]
        if math.isfinite(loss):
            numbers[2] = round(loss, 4)
            numbers[3] = round(loss - score, 4) if header.score == DIFFERENCE else None
        return [*numbers, round(score, 4)]

    def kind(places: npt.NDArray[np.int64]) -> Numbers:
        """Returns a kind's count, sum of scores, and some blocks, evenly from best to worst."""
        shown = np.unique(np.linspace(0, len(places) - 1, some).round().astype(int))
        return {
            "count": len(places),
            "total": round(float(score_C[places].sum(dtype=np.float64)), 4),
            "blocks": [block(place) for place in places[shown]] if len(places) else [],
        }

    for source in range(len(header.sources)):
        mine = np.flatnonzero((source_C == source) & np.isfinite(score_C))
        mine = mine[np.argsort(-score_C[mine], kind="stable")]
        if len(mine):
            won, lost = mine[chosen_C[mine]], mine[~chosen_C[mine]]
            yield {"source": source, "range": part, "chosen": kind(won), "dropped": kind(lost)}


def render_explorer(
    data: dict[str, Any],
    *,
    recipe: str,
    arm: str,
    note: str = "",
    pages: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns the page for the data of `explore`; the note is the reason for missing texts.

    Args:
        data: What the page shows.
        recipe: Name of the recipe.
        arm: Label of the arm.
        note: The reason for missing texts.
        pages: Files and labels of all arms that have such a page.
    """
    return render("explorer.html", data=data, recipe=recipe, arm=arm, note=note, pages=pages)
