"""A floor of held-out blocks for small sources, and replay of the size of the adaptation corpus."""

from typing import Any

import numpy as np
import pytest
from corpus_cases import BYTE, S, manifest, run, source, texts, tree, write

from nemo_rod.corpus import BlockStore
from nemo_rod.corpus.hashing import holdout_mask, holdout_values
from nemo_rod.corpus.pack import pack

FRACTION = 0.05
COUNTS = {"new": 120, "small": 60, "large": 900}  # documents


@pytest.fixture
def corpus(tmp_path):
    roles = {"new": "adaptation", "small": "replay", "large": "replay"}
    return [
        source(name, [write(tmp_path / f"{name}.jsonl", texts(count, count))], role=roles[name])
        for name, count in COUNTS.items()
    ]


def packed(name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    documents = BYTE.encode_batch(texts(COUNTS[name], COUNTS[name]))
    return np.stack(list(pack(documents, S, BYTE.eod_id)))


def rows(store: BlockStore, name: str) -> set[bytes]:
    (source,) = (s for s in store.sources if s.name == name)
    return {row.tobytes() for row in store.tokens(source.start + np.arange(source.count))}


def test_without_a_floor_nothing_changes(tmp_path, corpus):
    one = run(tmp_path / "one", corpus)
    two = run(tmp_path / "two", corpus, holdout_floor=1, replay_ratio=1000.0)
    assert one.digest == two.digest


def test_replay_is_thinned_alike_in_all_sources(tmp_path, corpus):
    whole = run(tmp_path / "whole", corpus)
    train = run(tmp_path / "thin", corpus, replay_ratio=1.5)
    train.verify()
    share = 1.5 * whole.num_adaptation / whole.num_replay
    for split in ("train", "holdout"):
        before, after = (BlockStore(tmp_path / f, split) for f in ("whole", "thin"))
        after.verify()
        assert rows(before, "new") == rows(after, "new")
        for name in ("small", "large"):
            blocks = [np.frombuffer(row, np.int32) for row in rows(before, name)]
            values = holdout_values(np.stack(blocks), seed=42 ^ (1 << 127))
            order = np.argsort(values)
            kept = max(1, int((values < share * 2.0**64).sum()))
            assert rows(after, name) == {blocks[i].tobytes() for i in order[:kept]}
    assert manifest(tmp_path / "thin", "replay/large")["thinned"] == {
        "share": share,
        "of": manifest(tmp_path / "whole", "replay/large")["count"],
    }
    expected = 1.5 * whole.num_adaptation
    assert abs(train.num_replay - expected) < 4 * (expected * (1 - share)) ** 0.5


def test_what_is_left_of_thinned_replay_holds_out_the_floor(tmp_path, corpus):
    floor, options = 15, {"holdout_fraction": FRACTION, "replay_ratio": 0.5}
    train = run(tmp_path / "b", corpus, holdout_floor=floor, **options)
    held = BlockStore(tmp_path / "b", "holdout")
    for store in (train, held):
        store.verify()
    share = manifest(tmp_path / "b", "replay/large")["thinned"]["share"]
    blocks = packed("large")
    kept = blocks[holdout_values(blocks, seed=42 ^ (1 << 127)) < share * 2.0**64]
    assert holdout_mask(kept, fraction=FRACTION).sum() < floor < len(kept) // 5
    order = np.argsort(holdout_values(kept), kind="stable")
    assert rows(held, "large") == {kept[i].tobytes() for i in order[:floor]}
    assert rows(train, "large") == {kept[i].tobytes() for i in order[floor:]}
    left = len(rows(train, "small")) + len(rows(held, "small"))
    assert len(rows(held, "small")) >= max(1, min(floor, left // 5))


def test_a_second_run_changes_nothing(tmp_path, corpus):
    trees = []
    for _ in range(2):
        run(tmp_path / "blocks", corpus, holdout_floor=20, replay_ratio=1.0)
        trees.append(tree(tmp_path / "blocks"))
    assert trees[0] == trees[1]


def test_another_share_is_refused_or_made_again(tmp_path, corpus):
    root = tmp_path / "blocks"
    run(root, corpus, replay_ratio=1.0)
    with pytest.raises(ValueError, match=r"replay_ratio was 1\.0 and is now 2\.0"):
        run(root, corpus, replay_ratio=2.0)
    with pytest.raises(ValueError, match=r"holdout_floor was None and is now 30"):
        run(root, corpus, replay_ratio=1.0, holdout_floor=30)
    more = source("more", [write(tmp_path / "more.jsonl", texts(90, 7))], role="adaptation")
    with pytest.raises(ValueError, match=r"keeps a share of 0\.\d+ of its blocks, and the other"):
        run(root, [*corpus, more], replay_ratio=1.0)
    run(root, [*corpus, more], replay_ratio=1.0, rebuild=True)
    assert tree(root) == tree(run(tmp_path / "new", [*corpus, more], replay_ratio=1.0).root)
