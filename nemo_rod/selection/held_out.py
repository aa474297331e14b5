"""Held-out losses during a run: per source, and the convergence that they decide.

The paper trains its no-replay arm "until the adaptation validation loss converges", then half an
epoch more with a decaying learning rate (appendix, "adaptation reference"). It does not define
convergence; the rule here is ours. It is a function of recorded losses, so a resumed run decides
exactly as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rod.selection.selector import BlockScorer

START_FILE = "validation_start.json"  # of a run's folder: the losses before its first step


def source_losses(
    scorer: BlockScorer, sources: Sequence[Any], *, num_blocks: int
) -> dict[str, float]:
    """Returns `validation/<role>/<source>/loss` of the current model on held-out blocks.

    It is the mean over the first `num_blocks` blocks of a source, nats per token. Sources have
    `name`, `role`, `start` and `count`, which is not 0.
    """
    ids = {
        f"validation/{source.role}/{source.name}/loss": source.start
        + np.arange(min(source.count, num_blocks))
        for source in sources
    }
    loss = scorer.losses(np.concatenate(list(ids.values()))).astype(np.float64)
    starts = np.cumsum([0, *(len(part) for part in ids.values())])
    return {
        name: float(loss[start:stop].mean())
        for name, start, stop in zip(ids, starts, starts[1:], strict=False)
    }


@dataclass(frozen=True)
class Rule:
    """Losses have converged once they stop improving."""

    tolerance: float  # smallest decrease of the best loss that is an improvement, nats per token
    patience: int  # consecutive validations without improvement
    decay_steps: int  # updates with a decaying learning rate that follow

    def converged_at(self, losses: Iterable[tuple[int, float]]) -> int | None:
        """Returns the number of updates after which the losses converged; None if not yet.

        Losses are pairs, in order, of the updates done and the loss then, nats per token.
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
    """Returns the adaptation loss of a validation, weighted by source size; None without one.

    Args:
        metrics: Metrics of one step, including `validation/adaptation/<source>/loss`.
        weights: Training blocks of each adaptation source.
    """
    losses: dict[str, Any] = {
        name: metrics.get(f"validation/adaptation/{name}/loss") for name in weights
    }
    if not weights or None in losses.values():
        return None
    total = math.fsum(weights[name] * loss for name, loss in losses.items())
    return total / sum(weights.values())
