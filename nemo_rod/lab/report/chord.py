"""The mathematics of the claims: the fixed-replay chord and linear fits.

The chord estimates the result of a tuned fixed replay share. Fixed shares trade adaptation loss
against forgetting along a curve that is almost straight in `ln F`. Interpolation in `ln F` between
the trained arms gives a value at RoD's own forgetting, for the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_POINTS = 3  # two points always lie on a line
ROUNDING = 1e-9  # nats, or times: values that differ by less are equal


@dataclass(frozen=True)
class ChordPoint:
    """An arm on the chord: its validation-loss forgetting and adaptation loss, in nats."""

    arm: str
    forgetting: float
    adapt_loss: float


@dataclass(frozen=True)
class ChordValue:
    """The chord's adaptation loss (nats) at a forgetting, and whether it is beyond its ends."""

    adapt_loss: float
    extrapolated: bool


@dataclass(frozen=True)
class Chord:
    """Adaptation loss of fixed replay as a piecewise linear function of `ln F`."""

    points: tuple[ChordPoint, ...]  # two or more, by ascending, positive and distinct forgetting

    @classmethod
    def through(cls, points: Sequence[ChordPoint]) -> Chord | None:
        """Returns the chord through fixed-replay arms; None unless two differ in forgetting > 0."""
        best: dict[float, ChordPoint] = {}
        for point in sorted(points, key=lambda point: -point.adapt_loss):
            if point.forgetting > 0:
                best[point.forgetting] = point  # at equal forgetting, the lower loss counts
        ordered = tuple(best[forgetting] for forgetting in sorted(best))
        return cls(ordered) if len(ordered) >= 2 else None

    def at(self, forgetting: float) -> ChordValue | None:
        """Returns the adaptation loss at a forgetting; the last segments extend beyond the ends.

        None for a forgetting of zero or less, where `ln F` is undefined.
        """
        if forgetting <= 0:
            return None
        inner = [point.forgetting for point in self.points[1:-1]]
        right = int(np.searchsorted(inner, forgetting)) + 1
        low, high = self.points[right - 1], self.points[right]
        width = math.log(high.forgetting / low.forgetting)
        fraction = math.log(forgetting / low.forgetting) / width
        adapt_loss = (1 - fraction) * low.adapt_loss + fraction * high.adapt_loss
        inside = self.points[0].forgetting <= forgetting <= self.points[-1].forgetting
        return ChordValue(adapt_loss, extrapolated=not inside)


def linear_fit(x: Mapping[str, float], y: Mapping[str, float]) -> tuple[float, float] | None:
    """Returns least-squares slope and intercept of y on x over the common sources.

    None with fewer than three sources or if all x are equal but for rounding.
    """
    pairs = _pairs(x, y)
    if pairs is None or np.ptp(pairs[0]) < ROUNDING:
        return None
    dx = pairs[0] - pairs[0].mean()
    slope = float(dx @ (pairs[1] - pairs[1].mean()) / (dx @ dx))
    return slope, float(pairs[1].mean() - slope * pairs[0].mean())


def pearson(x: Mapping[str, float], y: Mapping[str, float]) -> float | None:
    """Returns Pearson's r over the common sources.

    None with fewer than three sources or if either is constant but for rounding.
    """
    pairs = _pairs(x, y)
    if pairs is None or np.ptp(pairs, axis=1).min() < ROUNDING:
        return None
    dx, dy = pairs[0] - pairs[0].mean(), pairs[1] - pairs[1].mean()
    return float(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)))


def outlier(x: Mapping[str, float]) -> str | None:
    """Returns the source with most leverage on a fit on x: the one farthest from the mean of x.

    None below four sources, where too few would remain without it.
    """
    if len(x) <= MIN_POINTS:
        return None
    mean = math.fsum(x.values()) / len(x)
    return max(x, key=lambda name: abs(x[name] - mean))


def _pairs(x: Mapping[str, float], y: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray] | None:
    names = [name for name in x if name in y]
    if len(names) < MIN_POINTS:
        return None
    return np.array([x[name] for name in names]), np.array([y[name] for name in names])
