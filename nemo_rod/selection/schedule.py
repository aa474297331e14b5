"""A policy that follows a plan: the share of replay, or of every source, by step.

    Schedule(replay=0.2)                              a constant
    Schedule(replay={0: 0.0, 1000: 0.3})              linear from step 0 to 1000, then constant
    Schedule(sources={"laws": 0.7, "web": {0: 0.1, 1000: 0.3}, "code": 0.2})
    Schedule(file="shares.csv")                       columns `step`, and `replay` or sources

Shares of sources are divided by their sum. No block is scored.

Shape suffixes: C = candidates, G = roles or sources, N = points of a plan.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rod.files import read_bytes
from nemo_rod.selection.arrays import Floats, Ids
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.policies import NOTHING, Policy, apportion, first_of_groups

Points = float | Mapping[int, float]  # a constant, or step -> share, linear in between


@dataclass(frozen=True)
class Schedule(Policy):
    """Chooses random blocks in planned shares; what the pool lacks is taken from what is left.

    Example:
        >>> pool = Pool(0, np.arange(4), np.array([False, False, True, True]))
        >>> Schedule(replay=0.5).select(pool, None, 2)
        array([0, 2])

    Raises:
        ValueError: not exactly one plan is given, or it has no points or other values than shares.
    """

    replay: Points | None = None  # share of replay in a batch, in [0, 1]
    sources: Mapping[str, Points] | None = None  # weights of all sources, >= 0
    file: str | None = None  # CSV file of either, a row for each point
    needs = NOTHING

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"A schedule has {' and '.join(given) or 'no plan'}: give one of replay, sources "
                "and file."
            )
        plan: Mapping[str, Points] = {}
        if self.file is not None:
            try:
                rows = list(csv.DictReader(read_bytes(Path(self.file)).decode().splitlines()))
                names = [name for name in rows[0] if name != "step"]
                plan = {n: {int(row["step"]): float(row[n]) for row in rows} for n in names}
            except (OSError, LookupError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.file} cannot be read as a schedule ({type(error).__name__}: {error}): "
                    "expected CSV with the columns step and replay, or step and the names of all "
                    "sources."
                ) from error
        elif self.replay is not None:
            plan = {"replay": self.replay}
        elif self.sources is not None:
            plan = self.sources
        object.__setattr__(self, "_of_roles", [*plan] == ["replay"])
        object.__setattr__(self, "_plan", {name: _points(name, of) for name, of in plan.items()})
        limit = 1.0 if [*plan] == ["replay"] else math.inf
        for name, (_, share_N) in self._plan.items():  # type: ignore[attr-defined]
            fits_N = (share_N >= 0) & (share_N <= limit) & np.isfinite(share_N)
            if not fits_N.all():
                place = "" if self.file is None else f" in {self.file}"
                raise ValueError(
                    f"The schedule of {name}{place} has {share_N[~fits_N][0]:g}, expected shares "
                    "in [0, 1] of replay, or weights >= 0 of sources."
                )

    def shares(self, pool: Pool) -> Floats:
        """Returns the planned shares of roles, or of the pool's sources, float64 [G].

        Raises:
            ValueError: the plan lacks a source, has an unknown one, or weights that are all zero.
        """
        plan: Mapping[str, tuple[Floats, Floats]] = self._plan  # type: ignore[attr-defined]
        now = {name: float(np.interp(pool.step, *points)) for name, points in plan.items()}
        if self._of_roles:  # type: ignore[attr-defined]
            return np.array([1 - now["replay"], now["replay"]])
        names = [source.name for source in pool.sources]
        if {*names} != {*now} or not sum(now.values()):
            raise ValueError(
                f"The schedule has the sources {', '.join(now)}, but the run has "
                f"{', '.join(names)}: give each a weight, at least one above 0."
            )
        return np.array([now[name] for name in names])

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns k positions in the planned shares; see `Policy.select`."""
        is_of_roles: bool = self._of_roles  # type: ignore[attr-defined]
        group_C = np.asarray(pool.is_replay_C, np.int64) if is_of_roles else pool.source_C
        return first_of_groups(group_C, apportion(self.shares(pool), k, pool.step), k)


def _points(name: str, of: Points) -> tuple[Floats, Floats]:
    """Returns the steps and the shares of a plan, float64 [N], by ascending step."""
    points = {0: of} if isinstance(of, int | float) else dict(of)
    try:
        steps = {int(step): float(share) for step, share in points.items()}
    except (TypeError, ValueError):
        steps = {}
    if not steps:
        raise ValueError(f"The schedule of {name} is {of!r}, expected a share, or shares by step.")
    step_N = np.array(sorted(steps), dtype=np.float64)
    return step_N, np.array([steps[int(step)] for step in step_N])
