"""This NeMo-RL has what RoD builds on, and a pool's best half is chosen."""

import numpy as np

from nemo_rod import Joint, Pool, reducible_loss
from nemo_rod.hosts.nemo_rl import compat


def test_this_version_is_supported() -> None:
    compat.check_supported()
    assert compat.example_config().is_file()


def test_the_best_half_of_a_pool_is_chosen() -> None:
    now, reference = np.float32([3, 1, 2, 4]), np.float32([1, 1, 1.5, 1])
    pool = Pool(0, np.arange(4), np.array([False, True, True, False]))
    chosen = Joint(kappa=1).select(pool, reducible_loss(now, reference), 2)
    assert sorted(chosen) == [0, 3]
