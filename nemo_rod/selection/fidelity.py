"""How faithful cheaper scores are: the choices that they would have made from the same pool.

Scoring whole candidates yields the loss of every eighth of them, and so the exact score of every
prefix, at no extra cost. A run that scores in full thus shows the choice of each `scoring.prefix`
at the same step, on its own data.

Shape suffixes: C = candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from nemo_rod.selection.arrays import Floats, Nats
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.policies import Policy

PREFIXES = {"half": 4, "quarter": 2, "eighth": 1}  # in eighths of a block


@dataclass(frozen=True)
class Fidelity:
    """A choice by other scores, compared with the choice that was made.

    Attributes:
        overlap: Fraction of the chosen blocks that both choices share.
        share_drift: Replay share of the other choice minus that of the choice that was made.
        rank_correlation: Spearman's rank correlation between the two scores of all candidates; NaN
            if either is constant.
    """

    overlap: float
    share_drift: float
    rank_correlation: float


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


def prefix_fidelity(
    choice: Choice, policy: Policy, score: Callable[[int], Nats]
) -> dict[str, float | None]:
    """Compares a choice with that of every prefix: metrics `rod/prefix/<name>/<measure>`.

    Args:
        choice: The choice by the scores of whole candidates.
        policy: The policy that made it.
        score: Returns the candidates' scores by their first eighths, nats per token [C].
    """
    assert choice.score is not None
    metrics: dict[str, float | None] = {}
    for name, eighths in PREFIXES.items():
        score_C = score(eighths)
        if not np.isfinite(score_C[np.isfinite(choice.score)]).all():
            continue  # only some prefixes of a broken block are finite
        metrics |= fidelity_metrics(f"prefix/{name}", fidelity(choice, score_C, policy))
    return metrics


def fidelity_metrics(name: str, result: Fidelity) -> dict[str, float | None]:
    """Returns a comparison as metrics `rod/<name>/<measure>`; None for non-finite values."""
    return {
        f"rod/{name}/{measure}": value if math.isfinite(value) else None
        for measure, value in asdict(result).items()
    }


def rank_correlation(a_N: Floats, b_N: Floats) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank."""
    a, b = (_mean_ranks(values) for values in (a_N, b_N))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else math.nan


def _mean_ranks(values_N: Floats) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return mean_rank[inverse]
