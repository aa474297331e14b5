"""Curricula whose model is random numbers."""

from pathlib import Path

import numpy as np

from nemo_rod.corpus import BlockStore
from nemo_rod.selection import Curriculum
from nemo_rod.selection.arms import Arm, curriculum_header
from nemo_rod.selection.choice import choose


def write_curriculum(
    path: Path,
    store: BlockStore,
    *,
    steps: int,
    batch_size: int,
    scored: bool = True,
    seed: int = 0,
) -> None:
    """Writes the curriculum of an arm that takes the best half of its pools, or all without scores.

    The pools are the same for every seed, which is that of the losses.
    """
    arm = Arm(
        name="rod" if scored else "fixed_50", num_adaptation=store.num_adaptation,
        num_replay=store.num_replay, batch_size=batch_size, seed=0, balance="exact",
        multiplier=2 if scored else 1, kappa=1.0 if scored else None,
    )  # fmt: skip
    path.parent.mkdir(parents=True)
    header = curriculum_header(arm, store, None, config=path.parent.name)
    with Curriculum.create(path, header) as curriculum:
        for step in range(steps):
            loss_C = np.random.default_rng([step, seed]).random(arm.num_candidates, np.float32)
            given = (loss_C, np.full_like(loss_C, 0.25)) if scored else ()
            pool = arm.candidates.pool(step)
            curriculum.append(choose(pool, arm.policy(), batch_size, *given))
