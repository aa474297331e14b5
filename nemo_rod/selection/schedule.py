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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

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
        place = ""
        plan: Any = {"replay": self.replay} if self.replay is not None else self.sources
        if self.file is not None:
            place = f" in {self.file}"
            try:
                plan = _columns(read_bytes(Path(self.file)).decode("utf-8-sig"))
            except (OSError, TypeError, ValueError, csv.Error) as error:
                raise ValueError(
                    f"{self.file} cannot be read as a schedule ({error}): expected CSV with the "
                    "columns step and replay, or step and the names of all sources."
                ) from error
        if not isinstance(plan, Mapping) or not {*map(type, plan)} == {str}:
            raise ValueError(
                f"The schedule of sources is {plan!r}, expected a weight for each by its name."
            )
        of_roles = self.sources is None and [*plan] == ["replay"]
        points = {
            name: _points(f"The schedule of {name}{place}", of, 1.0 if of_roles else math.inf)
            for name, of in plan.items()
        }
        step_N = np.unique(np.concatenate([step_N for step_N, _ in points.values()]))
        total_N = sum(np.interp(step_N, *of) for of in points.values())
        if not of_roles and not np.all(total_N):
            raise ValueError(
                f"The schedule of {', '.join(plan)}{place} has no weight above 0 at step "
                f"{step_N[total_N == 0][0]:.0f}: give one of them a weight there."
            )
        object.__setattr__(self, "_of_roles", of_roles)
        object.__setattr__(self, "_plan", points)

    def check_sources(self, sources: Sequence[Any]) -> None:
        """Refuses a plan that lacks a source of the run, or has an unknown one."""
        names, planned = [source.name for source in sources], self._plan  # type: ignore[attr-defined]
        if not self._of_roles and {*names} != {*planned}:  # type: ignore[attr-defined]
            raise ValueError(
                f"The schedule has the sources {', '.join(planned)}, but the run has "
                f"{', '.join(names)}: give each a weight."
            )

    def shares(self, pool: Pool) -> Floats:
        """Returns the planned shares of roles, or of the pool's sources, float64 [G].

        Raises:
            ValueError: the plan lacks a source, or has an unknown one.
        """
        plan: Mapping[str, tuple[Floats, Floats]] = self._plan  # type: ignore[attr-defined]
        now = {name: float(np.interp(pool.step, *points)) for name, points in plan.items()}
        if self._of_roles:  # type: ignore[attr-defined]
            return np.array([1 - now["replay"], now["replay"]])
        self.check_sources(pool.sources)
        return np.array([now[source.name] for source in pool.sources])

    def select(self, pool: Pool, score_C: Floats | None, k: int) -> Ids:
        """Returns k positions in the planned shares; see `Policy.select`."""
        is_of_roles: bool = self._of_roles  # type: ignore[attr-defined]
        group_C = np.asarray(pool.is_replay_C, np.int64) if is_of_roles else pool.source_C
        return first_of_groups(group_C, apportion(self.shares(pool), k, pool.step), k)


def _columns(text: str) -> dict[str, list[tuple[float, float]]]:
    """Returns the steps and the shares in every column but `step` of a table in CSV."""
    table = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    names, *rows = table or [[]]
    if "step" not in names or not 1 < len(names) == len({*names}) or not rows:
        raise ValueError(f"it has {len(rows)} rows below the header {','.join(names)[:99]!r}")
    for row in rows:
        if len(row) != len(names):
            raise ValueError(f"{','.join(row)[:99]!r} has {len(row)} of {len(names)} fields")
    cells = (map(float, column) for column in zip(*rows, strict=True))
    columns = {name: [*column] for name, column in zip(names, cells, strict=True)}
    step_N = columns.pop("step")
    return {name: [*zip(step_N, share_N, strict=True)] for name, share_N in columns.items()}


def _points(where: str, of: Any, limit: float) -> tuple[Floats, Floats]:
    """Returns the steps and the shares of a plan, float64 [N], by ascending step.

    `of` is a share of at most `limit`, shares by step, or pairs of a step and a share.
    """
    try:
        pairs = [(0, of)] if isinstance(of, Real) else [*getattr(of, "items", of.__iter__)()]
        points = {_number(step): _number(share) for step, share in pairs}
    except (AttributeError, OverflowError, TypeError, ValueError):
        pairs, points = [], {}
    if not points:
        raise ValueError(f"{where} is {of!r}, expected a share, or shares by step.")
    for step in points:
        if not (step >= 0 and step.is_integer()):
            raise ValueError(f"{where} has the step {step:g}, expected whole steps from 0.")
    if len(points) < len(pairs):
        raise ValueError(f"{where} has a step twice: give each step once.")
    for share in points.values():
        if not 0 <= share <= limit or math.isinf(share):
            raise ValueError(
                f"{where} has {share:g}, expected shares in [0, 1] of replay, or weights >= 0 of "
                "sources."
            )
    step_N = np.array(sorted(points))
    return step_N, np.array([points[step] for step in step_N])


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)
