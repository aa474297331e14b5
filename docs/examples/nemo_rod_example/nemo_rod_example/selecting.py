"""A policy and a score. Shapes: C candidates, k chosen blocks."""

from dataclasses import dataclass

import numpy as np

from nemo_rod.selection import Pool
from nemo_rod.selection.arrays import Floats, Ids, Nats
from nemo_rod.selection.policies import SCORES, Policy


@dataclass(frozen=True)
class Capped(Policy):
    """Chooses the highest scores, but no more than a share of replay."""

    max_share: float = 0.5
    needs = SCORES

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ValueError(f"max_share={self.max_share}: expected a share in [0, 1].")

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        assert score_C is not None
        order = np.argsort(-score_C, kind="stable")  # ties go to the earlier candidate
        order = order[np.isfinite(score_C[order])]  # -inf is padding
        most = int(self.max_share * k + 1e-9)
        is_replay = pool.is_replay_C[order]
        fits = ~is_replay | (np.cumsum(is_replay) <= most)
        chosen = order[fits][:k]
        if len(chosen) < k:
            raise ValueError(f"{len(chosen)} blocks fit, expected {k}: raise max_share.")
        return np.sort(chosen)


def relative(loss_C: Floats, reference_C: Floats) -> Nats:
    """Returns the excess of the loss over the reference as a share of it, float32 [C]."""
    excess_C = (loss_C - reference_C) / np.maximum(reference_C, 0.1)
    return excess_C.astype(np.float32)
