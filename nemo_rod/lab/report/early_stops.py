"""Early stops: what an arm had learned and forgotten after each part of its steps, without a run.

The held-out losses of a run's validations (`validation.every`) are those of models that could have
been kept. They are on the first blocks of each source, and before the learning rate has fallen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from nemo_rod.lab.metrics import Metrics
from nemo_rod.roles import ROLES
from nemo_rod.selection.forgetting import forgetting_by_source, validation_forgetting, weighted_loss

Stops = list[dict[str, float]]  # step, adapt_loss, val_forgetting, signed_forgetting; nats a token


def stops_of(
    metrics: Metrics, start: Mapping[str, float], weights: Mapping[str, Mapping[str, int]]
) -> Stops:
    """Returns the results before the first step, 0, and after every validated one.

    Args:
        metrics: of the run.
        start: the losses before its first step, by the same keys.
        weights: training blocks by role and source.
    """
    keys = {role: metrics.held_out(role) for role in ROLES}
    every = [key for by_source in keys.values() for key in by_source.values()]
    is_finite = all(math.isfinite(start.get(key, math.nan)) for key in every)
    if not all(keys.values()) or not is_finite:
        return []
    columns = {key: dict(zip(*metrics.finite(key), strict=True)) for key in every}
    rows = sorted(set.intersection(*({*column} for column in columns.values())))
    looks = [(0, start), *((r, {key: columns[key][r] for key in every}) for r in rows)]
    before = {source: start[key] for source, key in keys["replay"].items()}
    counts = {role: {s: weights[role][s] for s in by_source} for role, by_source in keys.items()}
    stops = []
    for number, (row, loss) in enumerate(looks):
        adaptation, replay = (
            {source: float(loss[key]) for source, key in keys[role].items()} for role in ROLES
        )
        rise = forgetting_by_source(replay, before)
        stops.append(
            {
                "step": float(metrics.step_T[row] + 1) if number else 0.0,
                "adapt_loss": weighted_loss(adaptation, counts["adaptation"]),
                "val_forgetting": validation_forgetting(replay, before, counts["replay"]),
                "signed_forgetting": weighted_loss(rise, counts["replay"]),
            }
        )
    return stops


def at_forgetting(stops: Sequence[Mapping[str, float]], level: float) -> dict[str, float] | None:
    """Returns the first stop, between two, at which as much was forgotten as a level, in nats.

    Its step and adaptation loss are interpolated linearly. None if less was forgotten until the
    last stop, or more at the first.
    """
    for before, after in itertools.pairwise(stops):
        low, high = before["signed_forgetting"], after["signed_forgetting"]
        if low <= level <= high and not math.isclose(low, high):
            part = (level - low) / (high - low)
            return {
                key: before[key] + part * (after[key] - before[key])
                for key in ("step", "adapt_loss")
            }
    return None
