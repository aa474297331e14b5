"""The report's tables, each described once for Markdown and the page.

The paper's tables with our numbers come last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rod.lab.plan.plan_text import count
from nemo_rod.lab.report.designs import WHOLE, filter_kinds, scored_share
from nemo_rod.lab.report.paper import category_of, paper, paper_arms
from nemo_rod.lab.report.results import Results
from nemo_rod.selection.arm_names import parse_arm

Format = Callable[[Any], str]
Columns = dict[str, tuple[str, Format]]  # titles and formats of values by their key


@dataclass(frozen=True)
class Column:
    """A column: the `key` of its values in rows, a readable `title`, and their format `show`.

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


@dataclass(frozen=True)
class Table:
    """Rows of values by column key; a missing or None value is an empty cell."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    def to_markdown(self) -> str:
        """Returns a Markdown table with rounded, right-aligned numbers."""
        rule = [":--" if column.is_text else "--:" for column in self.columns]
        lines = [[column.title for column in self.columns], rule]
        lines += [[column.cell(row) for column in self.columns] for row in self.rows]
        return "".join(f"| {' | '.join(map(markdown, cells))} |\n" for cells in lines)


def table_of(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Columns, details: Container[str] = ()
) -> Table:
    """Returns a table of rows with those columns, of title and format, that have a value."""
    made = []
    for key, (title, show) in columns.items():
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            is_text = all(isinstance(value, str) for value in values)
            made.append(Column(key, title, show, is_text, key in details))
    return Table(name, tuple(made), tuple(rows))


def markdown(text: str) -> str:
    """Returns text, such as a name in a file of somebody else, that Markdown shows as it is."""
    text = re.sub(r"([\\`*\[\]|!#~])|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def decimals(places: int) -> Format:
    """Returns a format with this number of decimals and a true minus sign, not before a zero."""
    return lambda value: f"{value:z,.{places}f}".replace("-", "\N{MINUS SIGN}")


def with_sign(places: int) -> Format:
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
    return value if isinstance(value, str) else with_sign(3)(value)


ARM = ("Arm", lambda name: parse_arm(name).label)
NATS = decimals(3)


def arms_table(results: Results) -> Table:
    """Returns every arm's losses and budgets, and its gain over fixed replay at equal budgets."""
    rows = [row_of(results, name) for name in results["arms"]]
    columns: Columns = {
        "arm": ARM,
        "replay_share": ("Replay share", percent),
        "adapt_loss": ("Adaptation loss (nats)", NATS),
        "mean_adapt_loss": ("Adaptation loss, sources alike (nats)", NATS),
        "val_forgetting": ("Forgetting F_val (nats)", NATS),
        "mean_forgetting": ("Forgetting, sources alike (nats)", NATS),
        "task_forgetting": ("Task forgetting", NATS),
        "at_equal_tokens": ("Gain over fixed replay at equal tokens (nats)", gain),
        "at_equal_compute": ("Gain over fixed replay at equal compute (nats)", gain),
        "trained_tokens": ("Trained tokens", magnitude),
        "scored_tokens": ("Scored tokens", magnitude),
        "compute": ("Compute (plain steps)", decimals(0)),
        "runs": ("Cost (plain runs)", decimals(2)),
        "runs_in_all": ("Cost in all (plain runs)", decimals(2)),
        "time_ratio": ("Time per step, relative", times),
        "scored": ("Of its candidates scored", percent),
        "kept": ("Kept of RoD's gain", percent),
        "budget": ("Budget", times),
        "curriculum": ("Curriculum of", str),
        "references": ("References", str),
        "wall_seconds": ("Wall time (s)", decimals(0)),
        "seed": ("Seed", str),
    }
    for key in ("scored", "budget"):
        if {row[key] for row in rows} <= {None, 1.0}:  # the same for every arm
            del columns[key]
    details = {"mean_adapt_loss", "mean_forgetting", "compute", "curriculum", "references",
               "wall_seconds", "seed"}  # fmt: skip
    return table_of("arms", rows, columns, details)


def row_of(results: Results, name: str) -> dict[str, Any]:
    """Returns all that is said of an arm, by the keys of `results.json` and of `arms_table`."""
    arm, comparison = results["arms"][name], results["comparisons"][name]
    design, arms = arm["design"] or {}, results["arms"]
    plain = (arms.get("no_replay") or arms.get(results["reference_arm"]) or {}).get("compute")
    gain, scored = comparison["gain"], scored_share(arm)
    rod, of_rod = arms.get("rod") or {}, results["comparisons"].get("rod", {}).get("gain") or 0.0
    is_cheaper = scored is not None and scored < WHOLE
    is_as_long = arm["trained_tokens"] == rod.get("trained_tokens")
    keeps = gain is not None and of_rod > 0 and is_cheaper and is_as_long
    row = {**arm, **comparison, "arm": name, "scored": scored}
    row |= {"kept": gain / of_rod if keeps else None}  # of RoD's gain over fixed replay
    row |= {key: design.get(key) for key in ("budget", "curriculum")}
    row |= {"references": ", ".join(design.get("references") or []) or None}
    for key, cost in (("runs", arm["compute"]), ("runs_in_all", arm["compute_in_all"])):
        row[key] = cost / plain if plain and cost is not None else None
    for budget in ("tokens", "compute"):
        value = gain
        if comparison["on_chord"]:
            value = "on the chord"
        elif comparison["extrapolated"]:
            value = "beyond the fixed arms"  # there is nothing to compare with
        elif value is not None and not comparison[f"same_{budget}"]:
            value = "other budget"
        row[f"at_equal_{budget}"] = value
    return row


def sources_table(results: Results) -> Table:
    """Returns every source's blocks and epochs, and the forgetting of replay sources, by arm."""
    arms = results["arms"]
    names = filter_kinds(arms, "no_replay", "fixed", "rod")
    ratio = (arms.get("rod") or {}).get("sampling_ratio_by_source") or {}
    columns: Columns = {
        "source": ("Source", str), "role": ("Role", str),
        "blocks": ("Training blocks", decimals(0)),
        **{f"forgetting_{n}": (f"Forgetting, {parse_arm(n).label}", with_sign(3)) for n in names},
        "sampling_ratio": ("Sampling ratio, RoD", times),
        **{f"epochs_{n}": (f"Epochs, {parse_arm(n).label}", decimals(2)) for n in arms},
    }  # fmt: skip
    rows = []
    for role, source, blocks in (
        (role, *each) for role, counts in results["sources"].items() for each in counts.items()
    ):
        row = {"source": source, "role": role, "blocks": blocks, "sampling_ratio": None}
        for name, arm in arms.items():
            row[f"epochs_{name}"] = (arm["epochs_by_source"] or {}).get(role, {}).get(source)
            if role == "replay":
                row[f"forgetting_{name}"] = (arm["forgetting_by_source"] or {}).get(source)
                row["sampling_ratio"] = ratio.get(source)
        rows.append(row)
    worst = f"forgetting_{names[0]}" if names else ""
    rows.sort(key=lambda row: (row["role"], -(row.get(worst) or 0.0)))
    details = {f"epochs_{name}" for name in arms if name not in names}
    return table_of("sources", rows, columns, details)


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
    columns: Columns = {"arm": ARM} | {
        f"{key}_{part}": (f"{title}, {label}", NATS)
        for part, label in parts.items()
        for key, title in measures.items()
    }
    rows = []
    for name in in_order(name for run in runs for name in run["arms"]) if len(runs) > 1 else []:
        row: dict[str, Any] = {"arm": name}
        of_runs = [row_of(run, name) if name in run["arms"] else {} for run in runs]
        for one in of_runs:
            if one.get("extrapolated"):  # beyond the ends of the chord there is no gain
                one["gain"] = None
        for key in measures:
            values = [one.get(key) for one in of_runs]
            row |= {f"{key}_{i}": value for i, value in enumerate(values)}
            if len(known := [value for value in values if value is not None]) > 1:
                row[f"{key}_mean"] = sum(known) / len(known)
                row[f"{key}_range"] = max(known) - min(known)
        rows.append(row)
    # shares and gains of single seeds are in the files alone
    details = {f"{key}_{i}" for key in ("replay_share", "gain", "kept") for i in range(len(runs))}
    return table_of("seeds", rows, columns, details)


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the distinct names of arms in the order of `parse_arm`."""
    return sorted(set(names), key=lambda name: parse_arm(name).order)


def paper_table(results: Results) -> Table:
    """Returns every arm that the paper reports for this setting: our numbers and the paper's."""
    theirs = paper_arms(results["recipe"])
    columns: Columns = {"arm": ARM}
    for key, title, show in (
        ("adapt_loss", "adaptation loss", NATS), ("val_forgetting", "F_val", NATS),
        ("task_forgetting", "task forgetting", NATS), ("replay_share", "replay share", percent),
    ):  # fmt: skip
        columns[key] = (f"{title[:1].upper()}{title[1:]}", show)
        columns[f"paper_{key}"] = (f"Paper: {title}", show)
    rows = [
        {**results["arms"].get(name, {}), "arm": name}
        | {f"paper_{key}": value for key, value in theirs[name].items()}
        for name in in_order(theirs)
    ]
    return table_of("paper", rows, columns)


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
        if total := sum(counts[source] for source in sources):
            mean = math.fsum(counts[source] * loss[source] for source in sources) / total
            rows.append({"group": group, "loss": mean, "paper_loss": theirs.get(group)})
    columns: Columns = {
        "group": ("Replay data", str), "loss": ("Loss of the base (nats)", NATS),
        "paper_loss": ("Paper: loss of the base", decimals(2)),
    }  # fmt: skip
    return table_of("base_loss", rows, columns)


def capabilities_table(results: Results) -> Table:
    """Returns the change of accuracy against the base model, by capability and arm."""
    changes = {name: arm["capability_change"] for name, arm in results["arms"].items()}
    names = [name for name, change in changes.items() if change and name != "base"]
    columns: Columns = {"capability": ("Capability", str)}
    columns |= {name: (parse_arm(name).label, with_sign(3)) for name in names}
    rows = [
        {"capability": group, **{name: changes[name][group] for name in names}}
        for group in (changes[names[0]] if names else ())
    ]
    return table_of("capabilities", rows, columns)


TABLES = (
    arms_table, sources_table, seeds_table, paper_table, base_loss_table, capabilities_table,
)  # fmt: skip
