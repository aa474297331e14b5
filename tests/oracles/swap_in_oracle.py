"""What a swapped-in selector must have trained on, by plain arithmetic, whatever the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_rod.selection.curriculum.log import CurriculumArrays


def assert_trained_on_the_top(
    curriculum: CurriculumArrays, losses: Sequence[float], *, batch_size: int, num_drawn: int
) -> None:
    """Every sample was drawn once, the highest scores were trained on, and the base scores 0.

    Args:
        curriculum: of a whole run on a blend of two corpora of one size, replay the second.
        losses: of the steps, as the host reported them.
        batch_size: samples trained on in one step.
        num_drawn: candidates of all steps.
    """
    assert sorted(curriculum.block_ids.ravel()) == list(range(num_drawn))
    for score, chosen in zip(curriculum.score, curriculum.chosen, strict=True):
        order = sorted(range(len(score)), key=lambda i: (-score[i], i))
        assert sorted(order[:batch_size]) == np.flatnonzero(chosen).tolist()
    trained = [
        loss[chosen].astype(np.float64).mean()
        for loss, chosen in zip(curriculum.loss, curriculum.chosen, strict=True)
    ]
    np.testing.assert_allclose(losses, trained, rtol=0, atol=2e-6)
    # at the base a replay sample scores exactly 0
    is_replay = curriculum.block_ids[0] >= num_drawn // 2
    assert is_replay.any() and (curriculum.score[0][is_replay] == 0).all()
