"""When a run has learned what it can: a rule on the losses it recorded, and on nothing else.

The paper trains its no-replay arm "until the adaptation validation loss converges", then half an
epoch more with a decaying learning rate (appendix, "adaptation reference"). It does not say what
converging is; the rule here is ours. It is a function of recorded losses, so that a run that is
taken up again decides as the one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Converged are losses that have stopped getting better.

    Attributes:
        tolerance: nats per token by which a loss must be lower than the best one to be better.
        patience: looks in a row that are not better.
        decay_steps: updates with a decaying learning rate that follow.
    """

    tolerance: float
    patience: int
    decay_steps: int

    def converged_at(self, losses: Iterable[tuple[int, float]]) -> int | None:
        """Returns the number of updates after which the losses had converged, None if not yet.

        Args:
            losses: updates done and the loss then, in nats per token, in order.
        """
        best, waited = math.inf, 0
        for done, loss in losses:
            if loss < best - self.tolerance:
                best, waited = loss, 0
                continue
            waited += 1
            if waited == self.patience:
                return done
        return None


def adaptation_loss(metrics: Mapping[str, Any], weights: Mapping[str, int]) -> float | None:
    """The held-out loss on new text of one look, over sources by their size; None without a look.

    Args:
        metrics: of one step, among them `validation/adaptation/<source>/loss`.
        weights: training blocks of each adaptation source.
    """
    names = {name: f"validation/adaptation/{name}/loss" for name in weights}
    if not weights or any(metrics.get(key) is None for key in names.values()):
        return None
    total = math.fsum(weights[name] * metrics[key] for name, key in names.items())
    return total / sum(weights.values())
