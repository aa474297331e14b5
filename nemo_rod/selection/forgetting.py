"""Adaptation and forgetting from held-out losses (paper, appendix "Evaluation").

Every function takes mappings `source name -> held-out loss` (nats per token) of one role, of a
trained model and, on the same held-out blocks, of its base. A source's weight is its corpus
prevalence, in practice its number of training blocks; weights are normalised here. Without weights
every source counts equally, which is the paper's breadth-oriented diagnostic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def forgetting_by_source(
    loss_by_source: Mapping[str, float], base_loss_by_source: Mapping[str, float]
) -> dict[str, float]:
    """Increase of each source's loss over the base model: `l(o) - l_base(o)`.

    Differences are in nats and not capped: a negative value means that the source improved.

    Raises:
        ValueError: The mappings name different sources, or a loss is not finite.
    """
    _check_same_sources(loss_by_source, base_loss_by_source, "base losses")
    _check_finite(loss_by_source, "loss")
    _check_finite(base_loss_by_source, "base loss")
    return {name: loss - base_loss_by_source[name] for name, loss in loss_by_source.items()}


def validation_forgetting(
    loss_by_source: Mapping[str, float],
    base_loss_by_source: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
) -> float:
    """The paper's `F_val = sum_o w_o max(0, l(o) - l_base(o))`, in nats.

    Each difference is clipped at zero before the sum, so an improvement on one source cannot
    compensate for forgetting on another.

    Raises:
        ValueError: Sources differ, a loss is not finite, or the weights cannot be normalised.
    """
    differences = forgetting_by_source(loss_by_source, base_loss_by_source)
    capped = {name: max(0.0, difference) for name, difference in differences.items()}
    return weighted_loss(capped, weights)


def weighted_loss(
    loss_by_source: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> float:
    """The corpus-weighted mean over sources; for adaptation sources, the adaptation loss.

    Raises:
        ValueError: There is no source, a loss is not finite, or the weights name other sources or
            cannot be normalised.
    """
    if not loss_by_source:
        raise ValueError("no source to average over; evaluate at least one source of the role")
    _check_finite(loss_by_source, "loss")
    if weights is None:
        weights = dict.fromkeys(loss_by_source, 1.0)
    _check_same_sources(loss_by_source, weights, "weights")
    _check_finite(weights, "weight")
    negative = [name for name, weight in weights.items() if weight < 0]
    total = math.fsum(weights.values())
    if negative or total <= 0:
        found = f"{weights[negative[0]]} for source {negative[0]!r}" if negative else "only zeros"
        raise ValueError(
            f"weights hold {found}, expected non-negative numbers with a positive sum; "
            f"pass the number of training blocks of each source"
        )
    return math.fsum(weights[name] * loss for name, loss in loss_by_source.items()) / total


def _check_same_sources(
    loss_by_source: Mapping[str, float], other: Mapping[str, float], what: str
) -> None:
    missing = sorted(set(loss_by_source) - set(other))
    foreign = sorted(set(other) - set(loss_by_source))
    if missing or foreign:
        raise ValueError(
            f"{what} and losses must name the same sources, but the {what} lack {missing} and "
            f"hold {foreign} besides; evaluate both on the same block store"
        )


def _check_finite(values: Mapping[str, float], what: str) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(
                f"{what} of source {name!r} is {value}, expected a finite number; "
                f"evaluate that source again"
            )
