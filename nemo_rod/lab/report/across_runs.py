"""The same arms in several runs: their means and ranges over seeds, or run beside run.

    python -m nemo_rod.lab.report.across_runs runs/toy_controls/seed_*
    python -m nemo_rod.lab.report.across_runs runs/toy_sizes/* --each gap

The first prints a row for each arm: the mean of every measure, and the lowest and highest where the
runs differ. The second prints one measure, with a column for each run. The gap is the adaptation
loss less that of the chord at equal forgetting; beyond the ends of the chord it is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from nemo_rod.commands.text import table
from nemo_rod.files import read_json

MEASURES = {
    "adapt_loss": "adaptation loss",
    "val_forgetting": "F_val",
    "replay_share": "share of replay",
    "gap": "over the chord",
}

Arms = Mapping[str, Mapping[str, Any]]


def read_arms(run: Path) -> Arms:
    """Returns the `MEASURES` of a run's arms, by name.

    Raises:
        ValueError: The run has no report yet, or its results are damaged.
    """
    path = run / "report" / "results.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: run `nemo-rod report` of that run first.")
    results = read_json(path, "arms", "comparisons")
    gaps = {
        name: {"gap": None if row["extrapolated"] else row["gap"]}
        for name, row in results["comparisons"].items()
    }
    return {name: {**arm, **gaps.get(name, {})} for name, arm in results["arms"].items()}


def means(runs: Sequence[Arms]) -> list[tuple[str, ...]]:
    """Returns an arm's name and its `MEASURES` a row, of the arms that all runs have."""
    shared = [name for name in runs[0] if all(name in run for run in runs)]
    return [(name, *(_range([run[name].get(key) for run in runs]) for key in MEASURES))
            for name in shared]  # fmt: skip


def each(runs: Sequence[Arms], measure: str) -> list[tuple[str, ...]]:
    """Returns an arm's name and one measure in every run a row; empty where a run lacks it."""
    names = list(dict.fromkeys(name for run in runs for name in run))
    return [(name, *(_range([run.get(name, {}).get(measure)]) for run in runs)) for name in names]


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    low, high = f"{min(known):.3f}", f"{max(known):.3f}"
    return f"{mean(known):.3f}" + (f" ({low} to {high})" if low != high else "")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="The same arms in several runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--each", choices=list(MEASURES), help="a column for each run")
    given = parser.parse_args()
    try:
        runs = [read_arms(run) for run in given.runs]
    except ValueError as error:
        parser.error(str(error))
    if given.each:
        head, rows = [run.name for run in given.runs], each(runs, given.each)
    else:
        head, rows = list(MEASURES.values()), means(runs)
    print(table(("arm", *(f">{title}" for title in head)), rows))


if __name__ == "__main__":
    main()
