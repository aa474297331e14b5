"""Pools that follow a recorded run keep its counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_curriculum import SOURCES, Store

from nemo_rod.selection import Curriculum, CurriculumHeader, Joint, replay_share
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools

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
    with pytest.raises(ValueError, match="holds steps 0 to 8, but step 9 is needed"):
        FollowedPools(ROD.pools(), recorded, by="role").pool(STEPS)


def test_mean_share_counts_every_block(recorded):
    trained = [block for record in recorded for block in record.block_ids[record.chosen]]
    assert replay_share(recorded) == sum(block >= 40 for block in trained) / len(trained)
