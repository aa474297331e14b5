"""The mathematics of the claims: the fixed-replay chord and linear fits.

The chord estimates the result of a tuned fixed replay share. Fixed shares trade adaptation loss
against forgetting along a curve that is almost straight in `ln F`. Interpolation in `ln F` between
the trained arms gives a value at RoD's own forgetting, for the comparison.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

MIN_POINTS = 3  # two points always lie on a line
ROUNDING = 1e-9  # nats, or times: values that differ by less are equal
Point = tuple[float, float]  # an arm's validation-loss forgetting and adaptation loss, in nats
# adaptation loss of fixed replay, piecewise linear in `ln F`: two points or more by ascending F > 0
Chord = Sequence[Point]


def chord_through(points: Iterable[Point]) -> Chord:
    """Returns the chord through fixed-replay arms; empty unless two differ in forgetting > 0."""
    # at equal forgetting, the lower loss counts
    best = {f: loss for f, loss in sorted(points, key=lambda point: -point[1]) if f > 0}
    return sorted(best.items()) if len(best) >= 2 else []


def chord_at(chord: Chord, forgetting: float) -> tuple[float, bool] | None:
    """Returns a chord's adaptation loss at a forgetting, and whether it is beyond the chord's ends.

    The last segments extend beyond the ends. None without a chord, or for a forgetting of zero or
    less, where `ln F` is undefined.
    """
    if not chord or forgetting <= 0:
        return None
    right = bisect_left([point[0] for point in chord[1:-1]], forgetting) + 1
    (low, low_loss), (high, high_loss) = chord[right - 1 : right + 1]
    fraction = math.log(forgetting / low) / math.log(high / low)
    loss = (1 - fraction) * low_loss + fraction * high_loss
    return loss, not chord[0][0] <= forgetting <= chord[-1][0]


def linear_fit(x: Mapping[str, float], y: Mapping[str, float]) -> tuple[float, float] | None:
    """Returns least-squares slope and intercept of y on x over the common sources.

    None with fewer than three sources or if all x are equal but for rounding.
    """
    pairs = _pairs(x, y)
    if pairs is None or np.ptp(pairs[0]) < ROUNDING:
        return None
    return statistics.linear_regression(*pairs)


def pearson(x: Mapping[str, float], y: Mapping[str, float]) -> float | None:
    """Returns Pearson's r over the common sources.

    None with fewer than three sources or if either is constant but for rounding.
    """
    pairs = _pairs(x, y)
    if pairs is None or np.ptp(pairs, axis=1).min() < ROUNDING:
        return None
    return statistics.correlation(*pairs)


def outlier(x: Mapping[str, float]) -> str | None:
    """Returns the source with most leverage on a fit on x: the one farthest from the mean of x.

    None below four sources, where too few would remain without it.
    """
    if len(x) <= MIN_POINTS:
        return None
    mean = statistics.fmean(x.values())
    return max(x, key=lambda name: abs(x[name] - mean))


def _pairs(x: Mapping[str, float], y: Mapping[str, float]) -> tuple[list[float], ...] | None:
    names = [name for name in x if name in y]
    if len(names) < MIN_POINTS:
        return None
    return [x[name] for name in names], [y[name] for name in names]
