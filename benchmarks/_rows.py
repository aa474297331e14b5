"""What all benchmarks share: rows of results, and how they are timed and shown."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Row:
    """One result; a reference has no goal."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    holds: bool | None = None


def under(what: str, value: float, unit: str, goal: float) -> Row:
    """A value that should not exceed its goal."""
    return Row(what, float(value), unit, goal, bool(value <= goal))


def over(what: str, value: float, unit: str, goal: float) -> Row:
    """A value that should reach its goal."""
    return Row(what, float(value), unit, goal, bool(value >= goal))


def median_ms(action: Callable[[int], object], repeats: int, warm_up: int = 20) -> float:
    """Median time of `action(0)`, `action(1)`, ..., in milliseconds."""
    times = []
    for number in range(warm_up + repeats):
        begin = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times[warm_up:]))


@dataclass(frozen=True)
class Setting:
    """Where to measure, and how much."""

    folder: Path
    quick: bool


Measurement = Callable[[Setting], Iterator[Row]]


def run(doc: str, measurements: dict[str, Measurement], *, not_quick: tuple[str, ...] = ()) -> None:
    """Measure what the command line asks for, print a table and write the rows.

    Args:
        doc: What the benchmark says of itself.
        measurements: What there is, by name.
        not_quick: Those that --quick leaves out.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--only", nargs="+", choices=measurements, default=list(measurements))
    parser.add_argument("--quick", action="store_true", help="less of all, for a small machine")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    rows: list[Row] = []
    print(f"{'what':<50} {'value':>12} {'unit':<10} {'goal':>8}  holds")
    for name in arguments.only:
        if arguments.quick and name in not_quick:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for row in measurements[name](Setting(Path(folder), arguments.quick)):
                goal = "" if row.goal is None else f"{row.goal:g}"
                holds = {None: "", True: "yes", False: "NO"}[row.holds]
                text = f"{row.what:<50} {row.value:>12.3f} {row.unit:<10} {goal:>8}  {holds}"
                print(text.rstrip(), flush=True)
                rows.append(row)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
