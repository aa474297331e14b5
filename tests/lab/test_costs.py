"""Time, shares and savings by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_rod.config import Parallel
from nemo_rod.lab.plan.costs import Setup, Work, cost, prefix_saving
from nemo_rod.lab.plan.flops import forward_flops, recomputed_share
from nemo_rod.lab.plan.plan_text import count, hours, size, wall
from nemo_rod.lab.plan.shapes import read_shape
from nemo_rod.lab.plan.speed import Speed

SPEED = Speed(forward_flops=1e9, processes=4, flops_per_second=1e12, backward=2.0)
SETUP = Setup(
    speed=SPEED,
    parallel=Parallel(data=4),
    block_size=1000,
    micro_batch_size=1,
    scoring_micro_batch_size=4,
)
SHAPE = read_shape(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
)
ROD = Work(name="rod", steps=10, batch_size=32, pool_size=64)


def test_a_selecting_step_by_hand() -> None:
    # 32 blocks of 1000 tokens at 3 GFLOP each, on 4 processes of 1 TFLOP/s
    update = 32 * 1000 * 3e9 / 4e12
    stage = cost(ROD, SETUP, SHAPE)
    assert stage.update_seconds == pytest.approx(update)
    assert stage.scoring_seconds == pytest.approx(64 * 1000 * 1e9 / 4e12)
    assert stage.scoring_share == pytest.approx(2 / 5)  # m / (m + 3)
    assert stage.gpu_hours == pytest.approx(10 * update * 5 / 3 * 4 / 3600)
    assert stage.hours == pytest.approx(stage.gpu_hours / 4)
    assert stage.trained_tokens == 10 * 32 * 1000
    assert stage.scored_tokens == 10 * 64 * 1000
    assert stage.flops == pytest.approx(10 * (3 * 32 + 64) * 1000 * 1e9)


@pytest.mark.parametrize(("multiplier", "share"), [(1, 1 / 4), (2, 2 / 5), (4, 4 / 7), (8, 8 / 11)])
def test_the_share_of_scoring_follows_the_multiplier(multiplier: int, share: float) -> None:
    stage = cost(replace(ROD, pool_size=32 * multiplier), SETUP, SHAPE)
    assert stage.scoring_share == pytest.approx(share)


def test_replicas_split_their_share_of_a_pool_evenly_over_their_passes() -> None:
    assert SETUP.padded(64) == (64.0, 4)
    assert SETUP.padded(65) == (80.0, 5)
    assert SETUP.padded(0) == (0.0, 0)
    wide = replace(SETUP, scoring_micro_batch_size=32)
    assert wide.padded(64) == (64.0, 1)
    many = replace(SETUP, parallel=Parallel(data=1000), scoring_micro_batch_size=4)
    assert many.padded(2048) == (3000.0, 1)  # not 4 on each of them


def test_stages_of_a_pipeline_wait() -> None:
    pipelined = replace(SPEED, pipeline=4)
    # 8 micro-batches pass 4 stages in 8 + 3 slots
    assert pipelined.training(1e6, 8) == pytest.approx(SPEED.training(1e6, 8) * 11 / 8)
    interleaved = replace(pipelined, virtual_pipeline=3)
    assert interleaved.training(1e6, 8) == pytest.approx(SPEED.training(1e6, 8) * (1 + 3 / 24))


def test_a_quick_backward_pass_makes_forward_passes_dearer() -> None:
    assert SPEED.forward(1e6, 1) == pytest.approx(SPEED.training(1e6, 1) / 3)
    assert replace(SPEED, backward=1.5).forward(1e6, 1) == pytest.approx(
        SPEED.training(1e6, 1) / 2.5
    )


def test_recomputing_takes_time_of_the_update_alone() -> None:
    plain, full = cost(ROD, SETUP, SHAPE), replace(SPEED, recomputed=1.0)
    found = cost(ROD, replace(SETUP, speed=full), SHAPE)
    assert found.update_seconds == pytest.approx(plain.update_seconds * 4 / 3)
    assert found.scoring_seconds == plain.scoring_seconds
    assert found.scoring_share == pytest.approx(2 / 6)  # m / (m + 4)
    assert found.flops == pytest.approx(10 * (4 * 32 + 64) * 1000 * 1e9)
    slow = cost(ROD, replace(SETUP, host_seconds=0.5), SHAPE)
    assert slow.update_seconds == pytest.approx(plain.update_seconds + 0.5)
    assert slow.flops == plain.flops


def test_what_is_recomputed_is_a_share_of_a_forward_pass() -> None:
    assert recomputed_share(SHAPE, 1000, "none") == 0
    assert recomputed_share(SHAPE, 1000, "full") == 1
    # two layers with 4 FLOPs per channel of 16 and attended position, 500.5 on average
    attending = 2 * 4 * 16 * 500.5
    share = attending / forward_flops(SHAPE, 1000)
    assert recomputed_share(SHAPE, 1000, "selective") == pytest.approx(share)


def test_reading_a_corpus_needs_the_gpus_and_preparing_it_does_not() -> None:
    read = cost(Work(name="references_base", read=1600), SETUP, SHAPE)
    assert read.gpu_hours == pytest.approx(1600 * 1000 * 1e9 / 1e12 / 3600)
    prepare = cost(Work(name="prepare", cpu_seconds=7200, disk=5.0), SETUP, SHAPE)
    assert (prepare.hours, prepare.gpu_hours, prepare.flops, prepare.disk) == (2, 0, 0, 5)


def test_scoring_a_prefix_saves_its_share_and_the_attention_to_what_follows() -> None:
    whole, half = forward_flops(SHAPE, 1000), forward_flops(SHAPE, 1000, prefix=500)
    setup = replace(SETUP, speed=replace(SPEED, forward_flops=whole))
    saved = prefix_saving([(ROD, setup)], SHAPE, 4)
    seconds = 10 * 64 * (1000 * whole - 500 * half) / 4e12
    assert saved.gpu_hours == pytest.approx(seconds * 4 / 3600)
    assert saved.what == "score the first 500 tokens of a block alone: scoring.prefix=1/2"
    prefix = replace(ROD, eighths=4)
    plain, half_scored = cost(ROD, setup, SHAPE), cost(prefix, setup, SHAPE)
    assert plain.gpu_hours - half_scored.gpu_hours == pytest.approx(saved.gpu_hours)
    assert half_scored.scored_tokens == plain.scored_tokens / 2 == 10 * 64 * 500
    assert half_scored.flops == pytest.approx(10 * (3 * 32 * 1000 * whole + 64 * 500 * half))
    # seen from there, another half of the tokens is left to spare
    further = prefix_saving([(prefix, setup)], SHAPE, 2)
    assert further.gpu_hours + saved.gpu_hours == pytest.approx(
        prefix_saving([(ROD, setup)], SHAPE, 2).gpu_hours
    )


def test_numbers_for_people() -> None:
    assert [count(v) for v in (0, 12.41e9, 885e18, 7e21, 512)] == [
        *("", "12.4 G", "885 E", "7 Z", "512 ")
    ]
    assert size(369e9) == "369 GB"
    assert [wall(v) for v in (153.9, 32.5, 0.5, 0.01, 71.9)] == [
        *("6 d 10 h", "32.5 h", "30 min", "36 s", "3 d 0 h")
    ]
    assert [hours(v) for v in (2469.8, 1, 0.0123)] == ["2,469.8", "1.0", "0.012"]
