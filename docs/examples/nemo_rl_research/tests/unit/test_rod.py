"""The recipes are valid for NeMo-RL's own schema, and a pool's best half is chosen."""

from pathlib import Path

import numpy as np
import pytest

from nemo_rod import Joint, reducible_loss
from nemo_rod.hosts.nemo_rl import settings

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(recipe: Path) -> None:
    config = settings.load(recipe, ["rod.blocks=blocks", "rod.out=out"])
    assert config["rod"]["arm"] == "rod" and config["policy"]["megatron_cfg"]["enabled"]


def test_the_best_half_of_a_pool_is_chosen() -> None:
    now, reference = np.float32([3, 1, 2, 4]), np.float32([1, 1, 1.5, 1])
    is_replay = np.array([False, True, True, False])
    chosen = Joint(kappa=1).select(reducible_loss(now, reference), is_replay, 2)
    assert sorted(chosen) == [0, 3]
