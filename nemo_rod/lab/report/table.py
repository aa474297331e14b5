"""The report's tables, each described once for CSV (unrounded), Markdown and the page.

The paper's tables with our numbers come last.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_rod.lab.plan.plan_text import count
from nemo_rod.lab.report.designs import WHOLE, scored_share
from nemo_rod.lab.report.paper import category_of, paper, paper_arms
from nemo_rod.lab.report.results import Results
from nemo_rod.selection.arm_names import filter_kinds, parse_arm

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
# of a gain over the chord beyond its ends
EXTRAPOLATED = Column("extrapolated", "Gain extrapolated", lambda _: "yes", is_text=True)


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
        for row in self.rows:
            writer.writerow(_uncomputed(row.get(column.key)) for column in self.columns)
        return stream.getvalue()

    def to_markdown(self) -> str:
        """Returns a Markdown table with rounded, right-aligned numbers."""
        rule = [":--" if column.is_text else "--:" for column in self.columns]
        lines = [[column.title for column in self.columns], rule]
        lines += [[column.cell(row) for column in self.columns] for row in self.rows]
        return "".join(f"| {' | '.join(map(markdown, cells))} |\n" for cells in lines)


def _uncomputed(cell: Any) -> Any:
    """Returns a cell, without a text that a spreadsheet would take for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell


def markdown(text: str) -> str:
    """Returns text, such as a name in a file of somebody else, that Markdown shows as it is."""
    text = re.sub(r"([\\`*\[\]|!#~])|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def decimals(places: int) -> Format:
    """Returns a format with this number of decimals and a true minus sign, not before a zero."""
    return lambda value: f"{value:z,.{places}f}".replace("-", "\N{MINUS SIGN}")


def signed(places: int) -> Format:
    """Returns a format with this number of decimals and an explicit sign."""
    return lambda value: f"{value:+z.{places}f}".replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """Formats a share as a percentage."""
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    """Formats a ratio, e.g. "1.67x" with a true multiplication sign."""
    return f"{value:.2f}\N{MULTIPLICATION SIGN}"


def magnitude(value: float) -> str:
    """Formats a large count in thousands, millions, billions (B) or trillions."""
    return count(value).replace("G", "B").strip() or "0"


def gain(value: float | str) -> str:
    """Formats a gain; text is returned unchanged."""
    return value if isinstance(value, str) else signed(3)(value)


def arms_table(results: Results) -> Table:
    """Returns every arm's losses and budgets, and its gain over fixed replay at equal budgets."""
    columns = (
        ARM,
        Column("replay_share", "Replay share", percent),
        Column("adapt_loss", "Adaptation loss (nats)", decimals(3)),
        Column("mean_adapt_loss", "Adaptation loss, sources alike (nats)", decimals(3)),
        Column("val_forgetting", "Forgetting F_val (nats)", decimals(3)),
        Column("mean_forgetting", "Forgetting, sources alike (nats)", decimals(3)),
        Column("task_forgetting", "Task forgetting", decimals(3)),
        Column("at_equal_tokens", "Gain over fixed replay at equal tokens (nats)", gain),
        Column("at_equal_compute", "Gain over fixed replay at equal compute (nats)", gain),
        Column("trained_tokens", "Trained tokens", magnitude),
        Column("scored_tokens", "Scored tokens", magnitude),
        Column("compute", "Compute (plain steps)", decimals(0)),
        Column("compute_ratio", "Compute, relative", times),
        Column("time_ratio", "Time per step, relative", times),
        Column("scored", "Of its candidates scored", percent),
        Column("kept", "Kept of RoD's gain", percent),
        Column("budget", "Budget", times),
        Column("curriculum", "Curriculum of", is_text=True, is_detail=True),
        Column("references", "References", is_text=True, is_detail=True),
        Column("wall_seconds", "Wall time (s)", decimals(0), is_detail=True),
        Column("seed", "Seed", is_detail=True),
    )
    rows = []
    for name, arm in results["arms"].items():
        comparison = results["comparisons"][name]
        design = arm["design"] or {}
        row = {**arm, **comparison, "arm": name, "scored": scored_share(arm)}
        row |= {key: design.get(key) for key in ("budget", "curriculum")}
        row |= {"references": ", ".join(design.get("references") or []) or None}
        row |= {"kept": kept(results, name)}
        for budget in ("tokens", "compute"):
            value = comparison[f"gain_at_equal_{budget}"]
            if comparison["on_chord"]:
                value = "on the chord"
            elif comparison["extrapolated"]:
                value = "beyond the fixed arms"  # there is nothing to compare with
            elif comparison["gain"] is not None and value is None:
                value = "other budget"
            row[f"at_equal_{budget}"] = value
        rows.append(row)
    # the mean of one source, or of sources of one size, is the weighted one
    alike = {"mean_adapt_loss": "adapt_loss", "mean_forgetting": "val_forgetting"}
    used = []
    for column in (c for c in columns if any(row.get(c.key) is not None for row in rows)):
        other = [column.cell({column.key: row.get(alike.get(column.key, ""))}) for row in rows]
        is_repeated = other == [column.cell(row) for row in rows]
        if column.key in ("scored", "budget"):  # the same for every other arm
            is_repeated = {row[column.key] for row in rows} <= {None, 1.0}
        used.append(replace(column, is_detail=column.is_detail or is_repeated))
    return Table("arms", tuple(used), tuple(rows))


def kept(results: Results, name: str) -> float | None:
    """Returns the part of RoD's gain over fixed replay that an arm with less scoring keeps.

    None if it was trained on other amounts, or RoD has no gain.
    """
    arm, rod = (results["arms"].get(each) for each in (name, "rod"))
    gain, whole = (results["comparisons"].get(each, {}).get("gain") for each in (name, "rod"))
    if not arm or not rod or arm["trained_tokens"] != rod["trained_tokens"]:
        return None
    is_cheaper = (scored_share(arm) or 0.0) < WHOLE and scored_share(arm) is not None
    return gain / whole if is_cheaper and gain is not None and (whole or 0.0) > 0 else None


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
            "blocks": results["sources"]["replay"].get(source),
            "sampling_ratio": (ratio or {}).get(source),
            **{name: results["arms"][name]["forgetting_by_source"][source] for name in arms},
        }
        for source in order
    ]
    return Table("sources", tuple(columns), tuple(rows))


def intervals_table(results: Results) -> Table:
    """Returns the results of every arm between the ends of their intervals, see `intervals.py`."""
    measures = {"adapt_loss": "Adaptation loss", "val_forgetting": "F_val", "gain": "Gain"}
    rows = []
    for name, ends in results["intervals"].items():
        values = {**results["arms"][name], **results["comparisons"][name]}
        row = {"arm": name} | {key: values[key] for key in ends}
        row |= {f"{key}_p5": low for key, (low, _) in ends.items()}
        row |= {"extrapolated": True} if "gain" in ends and values["extrapolated"] else {}
        rows.append(row | {f"{key}_p95": high for key, (_, high) in ends.items()})
    columns = [
        Column(f"{key}{suffix}", f"{title}{more}", decimals(3))
        for key, title in measures.items()
        for suffix, more in (("", " (nats)"), ("_p5", ", 5 %"), ("_p95", ", 95 %"))
        if any(key in row for row in rows)
    ]
    columns += [EXTRAPOLATED] * any("extrapolated" in row for row in rows)
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


def seeds_table(results: Results) -> Table:
    """Returns an arm's losses, share and gain over the chord by seeds; no rows for a single run."""
    runs = [results, *results["replicates"]]
    measures = {
        "adapt_loss": "Adaptation loss", "val_forgetting": "F_val",
        "replay_share": "Share of replay", "gain": "Gain", "kept": "Kept of RoD's gain",
    }  # fmt: skip
    parts: dict[object, str] = {"mean": "mean", "range": "range"}
    for i, run in enumerate(runs):
        parts[i] = f"run {i + 1}" if run["seed"] is None else f"seed {run['seed']}"
    titles = {f"{key}_{part}": f"{title}, {label}" for part, label in parts.items()
              for key, title in measures.items()}  # fmt: skip
    rows = []
    for name in in_order(name for run in runs for name in run["arms"]) if len(runs) > 1 else []:
        row: dict[str, Any] = {"arm": name}
        for key in measures:
            values = [run["arms"].get(name, {}).get(key) for run in runs]
            if key == "gain":  # beyond the ends of the chord there is none
                compared = [run["comparisons"].get(name, {}) for run in runs]
                values = [
                    None if each.get("extrapolated") else each.get("gain") for each in compared
                ]
            elif key == "kept":
                values = [kept(run, name) for run in runs]
            row |= {f"{key}_{i}": value for i, value in enumerate(values)}
            if len(known := [value for value in values if value is not None]) > 1:
                row[f"{key}_mean"] = sum(known) / len(known)
                row[f"{key}_range"] = max(known) - min(known)
        rows.append(row)
    # shares and gains of single seeds are in the files alone
    details = {f"{key}_{i}" for key in ("replay_share", "gain", "kept") for i in range(len(runs))}
    columns = [
        Column(key, title, decimals(3), is_detail=key in details)
        for key, title in titles.items()
        if any(row.get(key) is not None for row in rows)
    ]
    return Table("seeds", (ARM, *columns), tuple(rows))


def costs_table(results: Results) -> Table:
    """Returns the costs of every scoring arm, in plain steps."""
    columns = (
        ARM,
        Column("updates", "Updates", decimals(0)),
        Column("scored_tokens", "Scored tokens", magnitude),
        Column("scoring", "Scoring them", decimals(0)),
        Column("specialist", "Once: the specialist", decimals(0)),
        Column("reference_losses", "Once: reference losses, at most", decimals(0)),
    )
    rows = tuple({"arm": name, **costs} for name, costs in results["costs"].items())
    return Table("costs", columns, rows)


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the distinct names of arms in the order of `parse_arm`."""
    return sorted(set(names), key=lambda name: parse_arm(name).order)


_MEASURES = {
    "adapt_loss": ("adaptation loss", decimals(3)),
    "val_forgetting": ("F_val", decimals(3)),
    "task_forgetting": ("task forgetting", decimals(3)),
    "replay_share": ("replay share", percent),
}


def paper_table(results: Results) -> Table:
    """Returns every arm that the paper reports for this setting: our numbers and the paper's."""
    theirs = paper_arms(results["recipe"])
    columns = [ARM]
    for key, (title, show) in _MEASURES.items():
        columns.append(Column(key, f"{title[:1].upper()}{title[1:]}", show))
        columns.append(Column(f"paper_{key}", f"Paper: {title}", show))
    rows = []
    for name in in_order(theirs):
        ours = results["arms"].get(name, {})
        row = {"arm": name, **{key: ours.get(key) for key in _MEASURES}}
        rows.append(row | {f"paper_{key}": theirs[name].get(key) for key in _MEASURES})
    return Table("paper", tuple(columns), tuple(rows))


def base_loss_table(results: Results) -> Table:
    """Returns the base model's loss on replay data, by category or source, and overall."""
    loss = results["base_loss_by_source"] or {}
    counts = results["weights"]["replay"]
    groups: dict[str, list[str]] = {}
    for source in loss:
        groups.setdefault(category_of(source) or source, []).append(source)
    groups["overall"] = list(loss)
    theirs = paper()["tab:proxy_replay_base_loss"].get(results["recipe"], {})
    rows = []
    for group, sources in groups.items():
        total = sum(counts[source] for source in sources)
        if total:
            mean = math.fsum(counts[source] * loss[source] for source in sources) / total
            rows.append({"group": group, "loss": mean, "paper_loss": theirs.get(group)})
    columns = [
        Column("group", "Replay data", is_text=True),
        Column("loss", "Loss of the base (nats)", decimals(3)),
    ]
    if theirs:
        columns.append(Column("paper_loss", "Paper: loss of the base", decimals(2)))
    return Table("base_loss", tuple(columns), tuple(rows))


def capabilities_table(results: Results) -> Table:
    """Returns the change of accuracy against the base model, by capability and arm."""
    arms = {name: arm for name, arm in results["arms"].items() if arm["capability_change"]}
    names = [name for name in arms if name != "base"]
    groups = arms[names[0]]["capability_change"] if names else {}
    columns = [Column("capability", "Capability", is_text=True)]
    columns += [Column(name, parse_arm(name).label, signed(3)) for name in names]
    rows = [
        {"capability": group, **{name: arms[name]["capability_change"][group] for name in names}}
        for group in groups
    ]
    return Table("capabilities", tuple(columns), tuple(rows))


TABLES = (
    arms_table, intervals_table, sources_table, epochs_table, costs_table,
    seeds_table, paper_table, base_loss_table, capabilities_table,
)  # fmt: skip
