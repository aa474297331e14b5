"""Pools that follow a recorded run keep its counts; several references give the lowest loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_curriculum import SOURCES, Store
from test_references import ArrayStore, complete, manifest, sums_of, write

from nemo_rod.selection import Curriculum, CurriculumHeader, FollowedPools, Joint, replay_share
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.references import References, compact, open_references

STEPS, K = 9, 8
ROD = make_arm(
    "rod",
    num_adaptation=40,
    num_replay=60,
    batch_size=K,
    multiplier=2,
    balance="expected",
    kappa=1.0,
    seed=3,
)


@pytest.fixture
def recorded(tmp_path: Path) -> Curriculum:
    """RoD with random scores, so that it replays now more and now less."""
    header = CurriculumHeader(
        num_candidates=2 * K,
        num_chosen=K,
        block_size=64,
        store="store-1",
        tokenizer="tokenizer-1",
        references="",
        config="",
        seed=3,
        sources=SOURCES,
    )
    curriculum = Curriculum.create(tmp_path / "curriculum.rod", header)
    random = np.random.default_rng(0)
    for step in range(STEPS):
        pool = ROD.pools().pool(step)
        score = random.random(2 * K).astype(np.float32)
        chosen = Joint().select(score, pool.is_replay, K)
        curriculum.append(Choice(pool, score, score, chosen, float(score[chosen].min())))
    return curriculum


def source_of(block_id: int) -> str:
    return next(name for name, _, start, count in SOURCES if start <= block_id < start + count)


def role_of(block_id: int) -> str:
    return "replay" if block_id >= 40 else "adaptation"


@pytest.mark.parametrize(("by", "group"), [("role", role_of), ("source", source_of)])
def test_the_first_blocks_of_each_group_as_many_as_recorded(recorded, by, group):
    pools = FollowedPools(ROD.pools(), recorded, by=by, store=Store())
    assert pools.size == K
    for record in recorded:
        left = [group(block) for block in record.block_ids[record.chosen]]
        expected = []
        for block in ROD.pools().pool(record.step).block_ids:  # one by one, while some are wanted
            if group(block) in left:
                left.remove(group(block))
                expected.append(block)
        pool = pools.pool(record.step)
        assert pool.block_ids.tolist() == expected
        assert pool.is_replay.tolist() == [role_of(block) == "replay" for block in expected]


def test_other_pools_that_hold_too_few_are_refused(recorded):
    all_new = replace(ROD, balance="corpus", retention=0.0, kappa=None)
    with pytest.raises(ValueError, match="blocks of replay, but the pool to draw from holds 0"):
        FollowedPools(all_new.pools(), recorded, by="role").pool(0)
    with pytest.raises(ValueError, match="holds steps 0 to 8, but step 9 was asked for"):
        FollowedPools(ROD.pools(), recorded, by="role").pool(STEPS)


def test_mean_share_counts_every_block(recorded):
    trained = [block for record in recorded for block in record.block_ids[record.chosen]]
    assert replay_share(recorded) == sum(block >= 40 for block in trained) / len(trained)


def test_of_several_references_of_a_block_the_lowest_counts(tmp_path):
    store, ids = ArrayStore(100), np.arange(100)
    replay = complete(tmp_path / "replay", 40, 100)
    specialist = complete(tmp_path / "specialist", 0, 40)
    base = tmp_path / "base"
    better = np.where(np.arange(40) % 3 == 0, -1, 1)[:, None]  # on every third block
    m = manifest(0, 40, model="model-2")
    write(base, 0, range(40), m, sums=(sums_of(range(40)) + better).astype(np.float32))
    compact(base, manifest=m, hashes=store.hashes)

    lowest = open_references([specialist, replay, base], store)
    one, other = (References.open([folder, replay], store) for folder in (specialist, base))
    assert (lowest[ids] == np.minimum(one[ids], other[ids])).all()
    assert (lowest[ids][:40:3] == other[ids][:40:3]).all()
    assert (lowest[ids][40:] == one[ids][40:]).all()
    assert (lowest.prefix(ids, 3) == np.minimum(one.prefix(ids, 3), other.prefix(ids, 3))).all()
    assert len({lowest.digest, one.digest, other.digest}) == 3
    assert open_references([specialist, replay], store).digest == one.digest
