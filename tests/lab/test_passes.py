"""How many passes a scoring takes, and what is scored for nothing: the plan counts what is run."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest

from nemo_rod.config import Parallel
from nemo_rod.lab.plan.costs import Setup
from nemo_rod.lab.plan.speed import Speed
from nemo_rod.selection.dealing import scoring_passes

LAYOUTS = [(1, 1, 1), (4, 1, 1), (1, 4, 1), (3, 2, 1), (2, 2, 2), (1, 4, 3)]


@pytest.mark.parametrize(("replicas", "pipeline", "chunks"), LAYOUTS)
def test_passes_hold_all_blocks_and_little_else(replicas: int, pipeline: int, chunks: int) -> None:
    for count, size, eighths in product((1, 5, 16, 33, 256), (1, 2, 4, 7), (1, 2, 4, 8)):
        per_pass, passes = scoring_passes(
            count, micro_batch_size=size, replicas=replicas, pipeline=pipeline, chunks=chunks,
            eighths=eighths,
        )  # fmt: skip
        unit = pipeline if chunks > 1 else 1
        assert passes % unit == 0
        assert per_pass * passes * replicas >= count
        assert per_pass * (passes - unit) * replicas < count  # one round fewer does not
        # no pass has more tokens than one of whole blocks
        assert per_pass * eighths <= size * 8
        # nor does any have more blocks than the fewest passes need
        whole = size * 8 // eighths if pipeline == 1 else size
        fewest = next(p for p in range(1, count + 1) if whole * p * replicas >= count)
        assert per_pass == ceil(ceil(count / replicas) / fewest)


def setup(parallel: Parallel, size: int, eighths: int = 8) -> Setup:
    speed = Speed(
        forward_flops=1.0,
        processes=parallel.world_size,
        flops_per_second=1.0,
        backward=2.0,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
    )
    return Setup(
        speed=speed, parallel=parallel, block_size=1, micro_batch_size=1,
        scoring_micro_batch_size=size, eighths=eighths,
    )  # fmt: skip


def test_plan_counts_rounding_of_replicas_and_of_interleaved_stages() -> None:
    # 20 blocks on 3 replicas in fours: 7 each, 2 passes, 24 in all
    assert setup(Parallel(data=3), 4).padded(20) == (24.0, 2)
    # quarters of them: up to 16 in a pass, so 7 in one
    assert setup(Parallel(data=3), 4, eighths=2).padded(20) == (21.0, 1)
    # but a pipeline keeps its micro-batches, and an interleaved one needs pairs of them
    assert setup(Parallel(pipeline=2), 4, eighths=2).padded(20) == (20.0, 5)
    assert setup(Parallel(pipeline=2, virtual_pipeline=2), 4).padded(20) == (24.0, 6)
    assert setup(Parallel(), 4).padded(0) == (0.0, 0)


def test_plan_counts_the_bubble_of_scoring() -> None:
    """Five micro-batches on two stages take six turns of half the model."""
    alone = setup(Parallel(), 4).scoring_seconds(20)
    stages = setup(Parallel(pipeline=2), 4).scoring_seconds(20)
    assert alone == pytest.approx(20.0)
    assert stages == pytest.approx(alone / 2 * 6 / 5)
