"""The report's tables, each described once for CSV (unrounded), Markdown and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rod.lab.report.arm_names import filter_kinds, parse_arm
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.verdicts import check_rows, run_labels

Format = Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A column: `key` in CSV files, a readable `title`, and the format `show` of values.

    The page omits details.
    """

    key: str
    title: str
    show: Format = str
    is_text: bool = False
    is_detail: bool = False

    def cell(self, row: Mapping[str, Any]) -> str:
        """Returns the row's formatted value; empty if it is None or missing."""
        value = row.get(self.key)
        return "" if value is None else self.show(value)


ARM = Column("arm", "Arm", lambda name: parse_arm(name).label, is_text=True)


@dataclass(frozen=True)
class Table:
    """Rows of values by column key; a missing or None value is an empty cell."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    def to_csv(self) -> str:
        """Returns comma-separated values, with unrounded numbers."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows([row.get(column.key) for column in self.columns] for row in self.rows)
        return stream.getvalue()

    def to_markdown(self) -> str:
        """Returns a Markdown table with rounded, right-aligned numbers."""
        rule = [":--" if column.is_text else "--:" for column in self.columns]
        lines = [[column.title for column in self.columns], rule]
        lines += [[column.cell(row) for column in self.columns] for row in self.rows]
        return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def arms_table(results: Results) -> Table:
    """Returns every arm's losses and budgets, and its gap to fixed replay at equal budgets."""
    columns = (
        ARM,
        Column("replay_share", "Replay share", percent),
        Column("adapt_loss", "Adaptation loss (nats)", decimals(3)),
        Column("mean_adapt_loss", "Adaptation loss, sources alike (nats)", decimals(3)),
        Column("val_forgetting", "Forgetting F_val (nats)", decimals(3)),
        Column("mean_forgetting", "Forgetting, sources alike (nats)", decimals(3)),
        Column("task_forgetting", "Task forgetting", decimals(3)),
        Column("at_equal_tokens", "Against fixed replay at equal tokens (nats)", gap),
        Column("at_equal_compute", "Against fixed replay at equal compute (nats)", gap),
        Column("trained_tokens", "Trained tokens", magnitude),
        Column("scored_tokens", "Scored tokens", magnitude),
        Column("compute", "Compute (plain steps)", decimals(0)),
        Column("compute_ratio", "Compute, relative", times),
        Column("time_ratio", "Time per step, relative", times),
        Column("wall_seconds", "Wall time (s)", decimals(0), is_detail=True),
        Column("seed", "Seed", is_detail=True),
    )
    rows = []
    for name, arm in results["arms"].items():
        comparison = results["comparisons"][name]
        row = {**arm, **comparison, "arm": name}
        for budget in ("tokens", "compute"):
            value = comparison[f"gap_at_equal_{budget}"]
            if comparison["on_chord"]:
                value = "on the chord"
            elif comparison["extrapolated"]:
                value = "beyond the fixed arms"  # of their forgetting: nothing to compare with
            elif comparison["gap"] is not None and value is None:
                value = "other budget"
            row[f"at_equal_{budget}"] = value
        rows.append(row)
    used = tuple(
        column for column in columns if any(row.get(column.key) is not None for row in rows)
    )
    return Table("arms", used, tuple(rows))


def sources_table(results: Results) -> Table:
    """Returns every replay source's size, forgetting per arm and RoD's sampling ratio."""
    arms = filter_kinds(results["arms"], "no_replay", "fixed", "rod")
    arms = [name for name in arms if results["arms"][name]["forgetting_by_source"]]
    columns = [
        Column("source", "Replay source", is_text=True),
        Column("blocks", "Training blocks", decimals(0)),
        *(Column(name, f"Forgetting, {parse_arm(name).label}", signed(3)) for name in arms),
    ]
    ratio = results["arms"].get("rod", {}).get("sampling_ratio_by_source")
    if ratio:
        columns.append(Column("sampling_ratio", "Sampling ratio, RoD", times))
    first = results["arms"][arms[0]]["forgetting_by_source"] if arms else {}
    order = sorted(first, key=lambda source: -first[source])
    rows = [
        {
            "source": source,
            "blocks": results["sources"]["replay"][source],
            "sampling_ratio": (ratio or {}).get(source),
            **{name: results["arms"][name]["forgetting_by_source"][source] for name in arms},
        }
        for source in order
    ]
    return Table("sources", tuple(columns), tuple(rows))


def intervals_table(results: Results) -> Table:
    """Returns the results of every arm between the ends of their intervals, see `intervals.py`."""
    measures = {"adapt_loss": "Adaptation loss", "val_forgetting": "F_val", "gap": "Gap to chord"}
    rows = []
    for name, ends in results["intervals"].items():
        values = {**results["arms"][name], **results["comparisons"][name]}
        row = {"arm": name} | {key: values[key] for key in ends}
        row |= {f"{key}_p5": low for key, (low, _) in ends.items()}
        rows.append(row | {f"{key}_p95": high for key, (_, high) in ends.items()})
    columns = [
        Column(f"{key}{suffix}", f"{title}{more}", decimals(3))
        for key, title in measures.items()
        for suffix, more in (("", " (nats)"), ("_p5", ", 5 %"), ("_p95", ", 95 %"))
        if any(key in row for row in rows)
    ]
    return Table("intervals", (ARM, *columns), tuple(rows))


def epochs_table(results: Results) -> Table:
    """Returns how often every source was trained on by each arm that trained."""
    epochs = {name: arm.get("epochs_by_source") for name, arm in results["arms"].items()}
    epochs = {name: by_role for name, by_role in epochs.items() if by_role}
    sources = {(r, s): n for r, counts in results["sources"].items() for s, n in counts.items()}
    columns = [
        Column("source", "Source", is_text=True),
        Column("role", "Role", is_text=True),
        Column("blocks", "Training blocks", decimals(0)),
        *(Column(name, parse_arm(name).label, decimals(2)) for name in epochs),
    ]
    rows = [
        {"source": source, "role": role, "blocks": blocks}
        | {name: by_role[role].get(source) for name, by_role in epochs.items()}
        for (role, source), blocks in sources.items()
    ]
    return Table("epochs", tuple(columns), tuple(rows if epochs else ()))


def checks_table(results: Results) -> Table:
    """Returns the claims with bounds, measurements (one per run) and verdicts."""
    labels = run_labels(results)

    def typeset(bound: str) -> str:
        return bound.replace("<=", "\u2264").replace(">=", "\u2265").replace("-", "\u2212")

    columns = (
        Column("claim", "What is measured", is_text=True),
        Column("bound", "Bound", typeset),
        *(
            Column(f"measured_{i}", f"Measured, {label}" if labels[1:] else "Measured", decimals(3))
            for i, label in enumerate(labels)
        ),
        Column("verdict", "Verdict", is_text=True),
        Column("kind", "Kind", is_text=True),
        Column("note", "Note", is_text=True),
    )
    rows = tuple(
        {**row, "note": "; ".join(row["notes"])}
        | {f"measured_{i}": value for i, value in enumerate(row["measured"])}
        for row in check_rows(results)
    )
    return Table("checks", columns, rows)


def seeds_table(results: Results) -> Table:
    """Returns adaptation loss and forgetting of every arm over seeds; no rows for a single run."""
    runs = [results, *results["replicates"]]
    measures = {"adapt_loss": "Adaptation loss", "val_forgetting": "F_val"}
    columns = [ARM]
    for i, label in enumerate(run_labels(results)):
        columns += [
            Column(f"{key}_{i}", f"{title}, {label}", decimals(3))
            for key, title in measures.items()
        ]
    for key, title in measures.items():
        columns.append(Column(f"{key}_mean", f"{title}, mean", decimals(3)))
        columns.append(Column(f"{key}_range", f"{title}, range", decimals(3)))
    rows = []
    for name in in_order(name for run in runs for name in run["arms"]) if len(runs) > 1 else []:
        row: dict[str, Any] = {"arm": name}
        for key in measures:
            values = [run["arms"].get(name, {}).get(key) for run in runs]
            row |= {f"{key}_{i}": value for i, value in enumerate(values)}
            mean, spread = mean_and_range(values)
            if spread is not None:
                row |= {f"{key}_mean": mean, f"{key}_range": spread}
        rows.append(row)
    return Table("seeds", tuple(columns), tuple(rows))


def costs_table(results: Results) -> Table:
    """Returns the costs of every scoring arm, in plain steps."""
    columns = (
        ARM,
        Column("updates", "Updates", decimals(0)),
        Column("scored_tokens", "Scored tokens", magnitude),
        Column("scoring", "Scoring them", decimals(0)),
        Column("specialist", "Once: the specialist", decimals(0)),
        Column("reference_losses", "Once: reference losses", decimals(0)),
    )
    rows = tuple({"arm": name, **costs} for name, costs in results["costs"].items())
    return Table("costs", columns, rows)


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the distinct names of arms in the order of `parse_arm`."""
    return sorted(set(names), key=lambda name: parse_arm(name).order)


def mean_and_range(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Returns the mean of the values that are not None, and the range of two or more."""
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else None
    return mean, max(known) - min(known) if len(known) > 1 else None


TABLES = (
    arms_table, intervals_table, sources_table, epochs_table, checks_table, costs_table, seeds_table
)  # fmt: skip


def decimals(places: int) -> Format:
    """Returns a format with this number of decimals and a true minus sign."""
    return lambda value: f"{value:,.{places}f}".replace("-", "\N{MINUS SIGN}")


def signed(places: int) -> Format:
    """Returns a format with this number of decimals and an explicit sign."""
    return lambda value: f"{value:+.{places}f}".replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """Formats a share as a percentage."""
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    """Formats a ratio, e.g. "1.67x" with a true multiplication sign."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def magnitude(value: float) -> str:
    """Formats a large count in thousands, millions or billions."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def gap(value: float | str) -> str:
    """Formats a signed gap; text is returned unchanged."""
    return value if isinstance(value, str) else signed(3)(value)
