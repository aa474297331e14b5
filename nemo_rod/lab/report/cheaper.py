"""The table of arms with less scoring: the cost of each, and the share of the gain that it keeps.

    gain    distance of an arm's adaptation loss below the chord of fixed replay, at equal F_val
    kept    its gain over RoD's, for equal trained tokens

It also shows what scoring the same prefix would have chosen in the steps of RoD itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rod.lab.report.designs import cheaper, scored_share
from nemo_rod.lab.report.table import (
    ARM,
    Column,
    Format,
    Table,
    decimals,
    in_order,
    mean_and_range,
    percent,
    signed,
)
from nemo_rod.selection.fidelity import PREFIXES

Results = Mapping[str, Any]

_PREFIX_OF = {eighths: name for name, eighths in PREFIXES.items()}
_MEASURES = (
    Column("adapt_loss", "Adaptation loss (nats)", decimals(3)),
    Column("val_forgetting", "Forgetting F_val (nats)", decimals(3)),
    Column("replay_share", "Replay share", percent),
    Column("gap", "Against fixed replay of equal F_val (nats)", signed(4)),
    Column("kept", "Kept of RoD's gain", percent),
    Column("overlap", "Same choice, in RoD's steps", percent),
    Column("share_drift", "Its replay share, less RoD's", signed(3)),
    Column("rank_correlation", "Rank correlation of scores", decimals(2)),
)


def cheaper_table(results: Results) -> Table:
    """Returns RoD and every arm that scores less: means over seeds, and their range."""
    runs = [results, *results["replicates"]]
    by_run = [_measured(run) for run in runs]
    names = in_order(name for run in by_run for name in run)
    rows = [_row(name, [run[name] for run in by_run if name in run]) for name in names]
    columns = [
        ARM,
        Column("scored", "Of the candidates is scored", percent),
        Column("compute", "Work (plain steps)", decimals(0)),
    ]
    for measure in _MEASURES:
        title = measure.title + (", mean" if len(runs) > 1 else "")
        columns.append(replace(measure, title=title))
        spread = f"{measure.key}_range"
        if any(row.get(spread) is not None for row in rows):
            is_detail = measure.key not in ("gap", "kept")
            columns.append(Column(spread, "Range", _unsigned(measure.show), is_detail=is_detail))
    return Table("cheaper", tuple(columns), tuple(rows))


def _unsigned(show: Format) -> Format:
    return lambda value: show(value).lstrip("+")


def _measured(results: Results) -> dict[str, dict[str, Any]]:
    """Returns the measures of each of a run's arms; a missing number is None."""
    arms, comparisons = results["arms"], results["comparisons"]
    rod, rows = arms.get("rod"), {}
    for name in cheaper(arms):
        arm, gap = arms[name], comparisons[name]["gap"]
        row = {key: arm[key] for key in ("compute", "adapt_loss", "val_forgetting", "replay_share")}
        row |= {"scored": scored_share(arm), "gap": gap, "kept": None}
        if rod and gap is not None and rod["trained_tokens"] == arm["trained_tokens"]:
            whole = comparisons["rod"]["gap"]
            row["kept"] = gap / whole if whole < 0 else None
        prefix = _PREFIX_OF.get(arm["design"]["scored_eighths"], "")
        rows[name] = {**row, **results["prefixes"].get(prefix, {})}
    return rows


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "scored": runs[0]["scored"], "compute": runs[0]["compute"]}
    for key in (column.key for column in _MEASURES):
        row[key], row[f"{key}_range"] = mean_and_range(run.get(key) for run in runs)
    return row
