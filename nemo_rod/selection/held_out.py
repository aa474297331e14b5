"""Held-out losses during a run, by source, and the convergence of the adaptation loss.

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

from nemo_rod.selection.forgetting import validation_forgetting, weighted_loss
from nemo_rod.selection.selector import BlockScorer

START_FILE = "validation_start.json"  # losses before a run's first step
HELD_OUT = 64  # samples or blocks of every source that the losses of a job are measured on


def is_due(done: int, *, every: int | None, steps: int) -> bool:
    """Returns whether held-out losses are measured after `done` steps: at intervals and the end."""
    return done == steps or done % (every or math.inf) == 0


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
    parts = np.split(loss, np.cumsum([len(part) for part in ids.values()])[:-1])
    return {
        name: float(part[~np.isneginf(part)].mean())
        for name, part in zip(ids, parts, strict=True)
        if not np.isneginf(part).all()  # samples without targets have no loss
    }


@dataclass(frozen=True)
class Rule:
    """Losses have converged once they stop improving."""

    tolerance: float  # smallest decrease of the best loss that is an improvement, nats per token
    patience: int  # consecutive validations without improvement
    decay_steps: int  # updates with a decaying learning rate that follow

    def converged_at(self, losses: Iterable[tuple[int, float]]) -> int | None:
        """Returns the number of updates after which the losses converged; None if not yet.

        Losses are pairs of the number of updates and the loss in nats per token, in order.
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


def adaptation_loss(metrics: Mapping[str, Any], sources: Iterable[Any]) -> float | None:
    """Returns the adaptation loss in the metrics of a step, nats per token; None without one."""
    losses = _source_losses(metrics, "adaptation")
    return weighted_loss(losses, weights_of(losses, "adaptation", sources)) if losses else None


def over_sources(
    metrics: Mapping[str, Any], start: Mapping[str, float], sources: Sequence[Any]
) -> dict[str, float]:
    """Returns `validation/adaptation_loss` and `validation/forgetting`, if they are measured.

    The latter is F_val (paper, appendix "Evaluation") relative to `start`, the losses before the
    first step, which are those of the base. Sources as in `adaptation_loss`.
    """
    row = {"validation/adaptation_loss": adaptation_loss(metrics, sources)}
    now, before = _source_losses(metrics, "replay"), _source_losses(start, "replay")
    if now and now.keys() == before.keys():
        weights = weights_of(now, "replay", sources)
        row["validation/forgetting"] = validation_forgetting(now, before, weights)
    return {name: value for name, value in row.items() if value is not None}


def weights_of(names: Iterable[str], role: str, sources: Iterable[Any]) -> dict[str, int]:
    """Returns the weights of a role's held-out sources: their blocks to train on, by name.

    If one is not trained on, as the old data of a job on new data alone, all count equally.
    """
    counts = {row.name: row.count for row in sources if row.role == role}
    weights = {name: counts.get(name, -1) for name in names}
    is_known = min(weights.values(), default=0) >= 0 and any(weights.values())
    return weights if is_known else dict.fromkeys(weights, 1)


def _source_losses(row: Mapping[str, Any], role: str) -> dict[str, float]:
    """Returns the held-out losses of a role's sources in a row; none of a run that diverges."""
    head = f"validation/{role}/"
    keys = [key for key in row if key.startswith(head) and row[key] is not None]
    losses = {key.removeprefix(head).removesuffix("/loss"): row[key] for key in keys}
    return losses if all(map(math.isfinite, losses.values())) else {}
