"""How faithful cheaper scores are: the choices that they would have made from the same pool.

Shape suffixes: C = candidates.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from nemo_rod.selection.arrays import Floats
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.policies import Policy


@dataclass(frozen=True)
class Fidelity:
    """A choice by other scores, compared with the choice that was made."""

    overlap: float  # fraction of the chosen blocks that both choices share
    share_drift: float  # replay share of the other choice minus that of the choice that was made
    rank_correlation: float  # Spearman's, over all candidates; NaN if either score is constant


def fidelity(choice: Choice, score_C: Floats, policy: Policy) -> Fidelity:
    """Compares a scored choice with the one that other scores [C] make by the same policy."""
    assert choice.score is not None
    is_replay_C, padding_C = choice.pool.is_replay, np.isneginf(choice.score)
    score_C = np.where(padding_C, -np.inf, score_C)
    chosen = policy.select(score_C, is_replay_C, len(choice.chosen))
    shared = len(np.intersect1d(chosen, choice.chosen))
    drift = is_replay_C[chosen].mean() - is_replay_C[choice.chosen].mean()
    correlation = rank_correlation(choice.score[~padding_C], score_C[~padding_C])
    return Fidelity(shared / len(chosen), float(drift), correlation)


def fidelity_metrics(name: str, result: Fidelity) -> dict[str, float | None]:
    """Returns a comparison as metrics `rod/<name>/<measure>`; None for non-finite values."""
    return {
        f"rod/{name}/{measure}": value if math.isfinite(value) else None
        for measure, value in asdict(result).items()
    }


def rank_correlation(a_N: Floats, b_N: Floats) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank."""
    ranks = []
    for values_N in (a_N, b_N):
        _, inverse_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
        rank_N = (np.cumsum(counts) - (counts - 1) / 2)[inverse_N]
        ranks.append(rank_N - rank_N.mean())
    a, b = ranks
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else math.nan
