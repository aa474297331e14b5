"""What arms cost, by hand; policies by name."""

from typing import Any

import pytest

from nemo_rod.selection.arms import Arm, make_arm


def arm(name: str, **options: Any) -> Arm:
    sizes = {"num_adaptation": 400, "num_replay": 800, "batch_size": 32}
    rest: dict[str, Any] = {"multiplier": 2.0, "balance": "exact", "kappa": 1.0, "seed": 0}
    return make_arm(name, **sizes, **rest | options)


@pytest.mark.parametrize(
    ("prefix", "multiplier", "compute"),
    [("1", 2, 500), ("1/2", 2, 400), ("1/4", 2, 350), ("1/8", 2, 325), ("1/4", 4, 400)],
)
def test_scoring_costs_a_third_of_a_step_for_every_candidate_per_block(prefix, multiplier, compute):
    rod = arm("rod", prefix=prefix, multiplier=multiplier)
    assert rod.compute(300) == pytest.approx(compute)
    assert rod.scored_blocks == 32 * multiplier * rod.scored_length(64) / 64


@pytest.mark.parametrize("name", ["no_replay", "fixed_32", "base"])
def test_arms_that_score_nothing_cost_their_steps(name):
    plain = arm(name, prefix="1/4")
    assert plain == arm(name)  # the key does not touch them, so that none is trained again
    assert (plain.compute(300), plain.scored_blocks) == (300, 0)
