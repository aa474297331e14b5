"""Adaptation and forgetting from held-out losses (paper, appendix "Evaluation").

Mappings are `source name -> held-out loss` (nats per token) of one role, of a trained model and, on
the same blocks, of its base. Weights, in practice numbers of training blocks, are normalised here;
without any, every source counts equally, which is the paper's breadth-oriented diagnostic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def forgetting_by_source(
    loss_by_source: Mapping[str, float], base_loss_by_source: Mapping[str, float]
) -> dict[str, float]:
    """Returns the increase of each source's loss over the base model: `l(o) - l_base(o)`.

    Differences are in nats and not capped: a negative value means that the source improved.

    Raises:
        ValueError: the mappings name different sources, or a loss is not finite.
    """
    _check_values(loss_by_source, base_loss_by_source, "base losses")
    return {name: loss - base_loss_by_source[name] for name, loss in loss_by_source.items()}


def validation_forgetting(
    loss_by_source: Mapping[str, float],
    base_loss_by_source: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
) -> float:
    """Returns the paper's `F_val = sum_o w_o max(0, l(o) - l_base(o))`, in nats.

    Each difference is clipped at zero before the sum, so an improvement on one source cannot
    compensate for forgetting on another.

    Example:
        >>> validation_forgetting({"web": 2.5, "code": 1.0}, {"web": 2.0, "code": 1.5})
        0.25

    Raises:
        ValueError: sources differ, a loss is not finite, or the weights cannot be normalised.
    """
    differences = forgetting_by_source(loss_by_source, base_loss_by_source)
    capped = {name: max(0.0, difference) for name, difference in differences.items()}
    return weighted_loss(capped, weights)


def weighted_loss(
    loss_by_source: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> float:
    """Returns the corpus-weighted mean over sources, such as the adaptation loss.

    Raises:
        ValueError: there is no source, a loss is not finite, or the weights name other sources or
            cannot be normalised.
    """
    if not loss_by_source:
        raise ValueError("no source to average over; evaluate at least one source of the role")
    weights = dict.fromkeys(loss_by_source, 1.0) if weights is None else weights
    _check_values(loss_by_source, weights, "weights")
    negative = [name for name, weight in weights.items() if weight < 0]
    total = math.fsum(weights.values())
    if negative or total <= 0:
        wrong = f"{weights[negative[0]]} for source {negative[0]!r}" if negative else "only zeros"
        raise ValueError(
            f"weights hold {wrong}, expected non-negative numbers with a positive sum; "
            f"pass the number of training blocks of each source"
        )
    return math.fsum(weights[name] * loss for name, loss in loss_by_source.items()) / total


def _check_values(losses: Mapping[str, float], values: Mapping[str, float], kind: str) -> None:
    """Refuses values for other sources than the losses have, and values that are not finite."""
    missing, foreign = sorted(set(losses) - set(values)), sorted(set(values) - set(losses))
    if missing or foreign:
        raise ValueError(
            f"{kind} and losses must name the same sources, but the {kind} lack {missing} and "
            f"have {foreign} in addition; evaluate both on the same block store"
        )
    known = [("losses", *item) for item in losses.items()]
    for of, name, value in known + [(kind, *item) for item in values.items()]:
        if not math.isfinite(value):
            raise ValueError(
                f"{of} hold {value} for source {name!r}, expected finite ones; evaluate it again"
            )
