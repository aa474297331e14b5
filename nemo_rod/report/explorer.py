"""The curriculum explorer: blocks that a source won and lost with, over any range of steps.

One static page, `curriculum.html`. It holds counts and mean scores of all candidates, and of some
of them the text; how many is bounded, so that the page of a long run opens on a phone.

Shape suffixes: N = steps, C = candidates, R = ranges of steps, O = sources.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.report.templates import render
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum

MAX_RANGES = 12  # parts of the run that a range of steps is made of
MAX_BLOCKS = 1200  # blocks with their text on the page
MAX_OF_A_KIND = 5  # of these, chosen or dropped ones of a source in one part of the run
MAX_CHARACTERS = 400  # of a block's text

Texts = Callable[[str, Sequence[int]], list[str]]
Numbers = dict[str, Any]


def explore(path: Path, texts: Texts | None = None) -> dict[str, Any] | None:
    """Returns what the page shows of a curriculum; None if it has no scored step.

    Args:
        path: `curriculum.rod`, also of a run under way.
        texts: Returns the texts of blocks, by the digest of their store and their ids; None for
            no texts.

    Raises:
        ValueError: If the file is no curriculum, or the texts cannot be read.
    """
    with Curriculum.open(path, read_only=True) as curriculum:
        header, num_steps = curriculum.header, len(curriculum)
        if not header.scored or num_steps == 0:
            return None
        parts = np.array_split(np.arange(num_steps), min(MAX_RANGES, num_steps))
        kinds = 2 * len(parts) * len(header.sources)
        some = max(1, min(MAX_OF_A_KIND, MAX_BLOCKS // kinds))
        arrays = curriculum.arrays()
        ranges: list[list[int]] = []
        cells: list[dict[str, Any]] = []
        for number, part in enumerate(parts):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            ranges.append([int(arrays.step[rows.start]), int(arrays.step[rows.stop - 1])])
            of_part = _Candidates(
                header, arrays.step[rows], arrays.block_ids[rows], arrays.loss[rows],
                arrays.score[rows], arrays.chosen[rows],
            )  # fmt: skip
            cells += of_part.cells(number, some)
    blocks = [block for cell in cells for block in cell["chosen"]["blocks"]]
    blocks += [block for cell in cells for block in cell["dropped"]["blocks"]]
    ids = sorted({block[1] for block in blocks})
    found = texts(header.store, ids) if texts else []
    return {
        "sources": [[row.role, row.name] for row in header.sources],
        "ranges": ranges,
        "cells": cells,
        "texts": {number: _cut(text) for number, text in zip(ids, found, strict=bool(texts))},
    }


class _Candidates:
    """All candidates of one part of the run, flat: step, id, loss, score, chosen, source."""

    def __init__(
        self,
        header: CurriculumHeader,
        step_N: npt.NDArray[np.int64],
        id_NC: npt.NDArray[np.int64],
        loss_NC: npt.NDArray[np.float32],
        score_NC: npt.NDArray[np.float32],
        chosen_NC: npt.NDArray[np.bool_],
    ) -> None:
        self.num_sources = len(header.sources)
        self.step = np.repeat(np.asarray(step_N), id_NC.shape[1])
        self.id, self.loss = np.ravel(id_NC), np.ravel(loss_NC)
        self.score, self.chosen = np.ravel(score_NC), np.ravel(chosen_NC)
        self.source = header.source_index(self.id)

    def cells(self, part: int, some: int) -> Iterator[Numbers]:
        """Returns counts, means and some blocks of every source."""
        for source in range(self.num_sources):
            mine = np.flatnonzero((self.source == source) & np.isfinite(self.score))
            mine = mine[np.argsort(-self.score[mine], kind="stable")]
            if len(mine):
                won = self.chosen[mine]
                kinds = {"chosen": mine[won], "dropped": mine[~won]}
                yield {
                    "source": source,
                    "range": part,
                    **{name: self._kind(places, some) for name, places in kinds.items()},
                }

    def _kind(self, places: npt.NDArray[np.int64], some: int) -> Numbers:
        """Returns a kind's count, sum of scores, and some blocks, evenly from best to worst."""
        shown = np.unique(np.linspace(0, len(places) - 1, some).round().astype(int))
        return {
            "count": len(places),
            "total": round(float(self.score[places].sum(dtype=np.float64)), 4),
            "blocks": [self._block(place) for place in places[shown]] if len(places) else [],
        }

    def _block(self, place: int) -> list[float | int | None]:
        """Returns step, id, loss, reference and score; null where a loss was estimated."""
        loss, score = float(self.loss[place]), float(self.score[place])
        known = math.isfinite(loss)
        return [
            int(self.step[place]),
            int(self.id[place]),
            round(loss, 4) if known else None,
            round(loss - score, 4) if known else None,
            round(score, 4),
        ]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "\u2026"


def render_explorer(data: dict[str, Any], *, recipe: str, arm: str, note: str = "") -> str:
    """Returns the whole page.

    Args:
        data: What `explore` returned.
        recipe: Name of the recipe.
        arm: Name of the arm.
        note: A sentence, such as why there are no texts.
    """
    from markupsafe import Markup

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # a text must not end the element that holds it
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return render("explorer.html", data=Markup(safe), recipe=recipe, arm=arm, note=note)
