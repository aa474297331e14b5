"""What a run writes down after every step, and what choosing added to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_rod.selection import Curriculum, CurriculumHeader, Joint, Pool, SourceRow, choose
from nemo_rod.selection.journal import Journal

HEADER = CurriculumHeader(
    num_candidates=4,
    num_chosen=2,
    block_size=64,
    store="s",
    tokenizer="t",
    references="r",
    config="c",
    seed=0,
    sources=(SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 2)),
)


def test_overhead_is_what_choosing_adds_to_an_update(tmp_path: Path) -> None:
    pool = Pool(0, np.arange(4), np.array([False, False, True, True]))
    losses = np.array([3.0, 1.0, 2.0, 1.0], dtype=np.float32), np.zeros(4, dtype=np.float32)
    choice = choose(pool, Joint(), 2, lambda: losses)
    journal = Journal(tmp_path, HEADER, step=0)
    # an update of 3 s, and 2 s of scoring before it: 5/3 of a plain step
    row = journal.append(0, choice, {"timing/train/total": 5.0, "timing/train/update": 3.0})
    assert row["rod/overhead"] == pytest.approx(2 / 3)
    assert row["rod/share/old"] == 0.5
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == row
    (record,) = Curriculum.open(tmp_path / "curriculum.rod", read_only=True)
    assert record.chosen.tolist() == [0, 2]
