"""The overlap report against looking for every window by hand."""

from pathlib import Path

import numpy as np
import pytest
from corpus_cases import run, source, texts, write

from nemo_rod.corpus import BlockStore
from nemo_rod.lab.overlap import Overlap, overlap_report


def by_hand(root: Path, window: int) -> dict[str, Overlap]:
    train, held = BlockStore(root), BlockStore(root, "holdout")
    size = train.block_size
    known = {
        block[i : i + window].tobytes()
        for block in train.tokens(np.arange(len(train)))
        for i in range(size - window + 1)
    }
    report = {}
    for s in held.sources:
        blocks = held.tokens(np.arange(s.start, s.start + s.count))
        hits = [
            [block[i : i + window].tobytes() in known for i in range(size - window + 1)]
            for block in blocks
        ]
        shared = np.array(hits, dtype=bool).reshape(s.count, -1)
        report[s.name] = Overlap(
            s.count, int(shared.any(axis=1).sum()), shared.size, int(shared.sum())
        )
    return report


@pytest.mark.parametrize("window", [1, 5, 20, 32])
def test_windows_are_counted_as_by_hand(tmp_path, window):
    quoted = texts(30, 1)
    random = np.random.default_rng(0)
    web = [text + quoted[random.integers(30)] for text in texts(150, 2)]
    sources = [
        source("new", [write(tmp_path / "a.jsonl", texts(100, 3) + quoted)], role="adaptation"),
        source("web", [write(tmp_path / "b.jsonl", web)]),
    ]
    run(tmp_path / "blocks", sources)
    report = overlap_report(tmp_path / "blocks", window=window)
    assert report == by_hand(tmp_path / "blocks", window)
    assert report["web"].share == report["web"].sharing / report["web"].blocks
    fewer = overlap_report(tmp_path / "blocks", window=window, max_blocks=3)
    assert fewer["web"].blocks == 3


def test_a_window_longer_than_a_block_is_refused(tmp_path):
    run(tmp_path / "blocks", [source("a", [write(tmp_path / "a.jsonl", texts(50, 1))])])
    with pytest.raises(ValueError, match="window must lie between 1 and the block size 32"):
        overlap_report(tmp_path / "blocks", window=33)
