"""The curriculum explorer: all candidates of a step, best first, with their text.

One static page, `curriculum.html`, with whole pools of some steps and the counts of every source.
The number of pools and the length of texts are bounded, so that the page opens on a phone.

Shape suffix: C = candidates of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rod.lab.history import history_of
from nemo_rod.selection.competition import number
from nemo_rod.selection.curriculum.header import DIFFERENCE
from nemo_rod.selection.curriculum.log import Curriculum

MAX_POOLED = 2000  # candidates in all pools that are shown; a larger pool is shown alone
MAX_CHARACTERS = 300  # shown characters of a block's text

Texts = Callable[[str, Sequence[int]], list[str]]


def explore(path: Path, texts: Texts | None = None) -> dict[str, Any] | None:
    """Returns a curriculum's data for the page; None if it has no scored step.

    The curriculum may be of a run under way; `texts` gives those of blocks, by the digest of their
    store and their ids.

    Returns:
        `sources`: role, name, candidates, chosen ones and mean score of each; `pools`: of some
        steps, with tau, and for every scored candidate id, loss, reference, score, source and
        whether it was chosen; `texts` by id. Losses in nats per token, null if unknown.

    Raises:
        ValueError: the file is not a curriculum, or the texts cannot be read.
    """
    with Curriculum.open(path, read_only=True) as curriculum:
        header, num_steps = curriculum.header, len(curriculum)
        if not header.scored or num_steps == 0:
            return None
        history = history_of(curriculum, bins=1)
        num_pools = min(num_steps, max(1, MAX_POOLED // header.num_candidates))
        pools: list[dict[str, Any]] = []
        for row in np.linspace(0, num_steps - 1, num_pools).round().astype(int).tolist():
            step = curriculum[row]
            source_C = header.source_index(step.block_ids)
            candidates = []
            for place in np.argsort(-step.score, kind="stable").tolist():
                loss, score = float(step.loss[place]), float(step.score[place])
                if np.isfinite(score) and source_C[place] >= 0:
                    reference = loss - score if header.score == DIFFERENCE else np.nan
                    values = [number(round(value, 4)) for value in (loss, reference, score)]
                    named = [int(source_C[place]), int(place in step.chosen)]
                    candidates.append([int(step.block_ids[place]), *values, *named])
            tau = number(round(step.threshold, 4))
            pools.append({"step": step.step, "tau": tau, "candidates": candidates})
    scored, total = (a.sum(axis=(0, 2)) for a in (history.scored_BOW, history.score_BOW))
    counts = (history.drawn_BO[0], history.chosen_BO[0], scored, total)
    ids = sorted({candidate[0] for pool in pools for candidate in pool["candidates"]})
    found = texts(header.store, ids) if texts else []
    cut = [t if len(t) <= MAX_CHARACTERS else t[: MAX_CHARACTERS - 1] + "\u2026" for t in found]
    return {
        "sources": [
            [s.role, s.name, int(drawn), int(chosen), float(sum_ / count) if count else None]
            for s, drawn, chosen, count, sum_ in zip(header.sources, *counts, strict=True)
        ],
        "pools": pools,
        "texts": dict(zip(ids, cut, strict=False)),
    }
