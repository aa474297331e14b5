"""The one reader of a `metrics.jsonl`: its numbers by name, without those by source of every step.

Which blocks were drawn and chosen of a source, and their scores, are in the curriculum
(`history.py`); a run of 100,000 steps on 60 sources would have 600 columns of them.

Shape suffix: T = steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.files import each_line

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """The numbers of a training run.

    Attributes:
        step_T: the steps, int64 [T].
        columns: by metric, the rows that have it, and its values there, which may not be finite.
    """

    step_T: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: Mapping[str, tuple[npt.NDArray[np.int64], Floats]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step_T)

    def finite(self, key: str, since: int = 0) -> tuple[npt.NDArray[np.int64], Floats]:
        """Returns the rows from one on where a metric is finite, and its values there, float64."""
        row, value = self.columns.get(key, (np.zeros(0, np.int64), np.zeros(0)))
        is_shown = np.isfinite(value) & (row >= since)
        return row[is_shown], value[is_shown]

    def values(self, key: str, since: int = 0) -> Floats:
        """Returns the finite values of a metric from a row on, float64; empty without any."""
        return self.finite(key, since)[1]

    def last(self, key: str) -> float | None:
        """Returns a metric of the last step; None if it has none that is finite."""
        row, value = self.finite(key)
        return float(value[-1]) if len(row) and row[-1] == len(self) - 1 else None

    def held_out(self, role: str) -> dict[str, str]:
        """Returns the keys of the held-out losses by source of a role."""
        prefix, suffix = f"validation/{role}/", "/loss"
        return {
            key.removeprefix(prefix).removesuffix(suffix): key
            for key in self.columns
            if key.startswith(prefix) and key.endswith(suffix)
        }


def metrics_of(rows: Any) -> Metrics:
    """Returns the numbers of rows of metrics, each with its `step`."""
    steps = array("q")
    columns: dict[str, tuple[array[int], array[float]] | None] = {"step": None}  # None: left out
    for place, row in enumerate(rows):
        steps.append(row["step"])
        for key, value in row.items():
            if key not in columns:
                is_by_source = key.startswith("rod/") and key.count("/") > 1
                columns[key] = None if is_by_source else (array("q"), array("d"))
            column = columns[key]
            if column is not None and isinstance(value, int | float):
                column[0].append(place)
                column[1].append(value)
    return Metrics(
        np.array(steps, np.int64),
        {k: (np.array(c[0], np.int64), np.array(c[1])) for k, c in columns.items() if c and c[0]},
    )


def read_metrics(path: Path) -> Metrics:
    """Returns the numbers in a `metrics.jsonl`; without any if there is no file.

    Raises:
        ValueError: a line is damaged or has no step; the message names the file.
    """
    return metrics_of(each_line(path, "step")) if path.is_file() else Metrics()
