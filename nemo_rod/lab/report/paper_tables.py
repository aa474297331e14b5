"""The paper's tables with our numbers, and the arms that score less."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from nemo_rod.lab.report.arm_names import filter_kinds, parse_arm
from nemo_rod.lab.report.designs import cheaper, continued, helped, scored_share
from nemo_rod.lab.report.paper import category_of, paper, paper_arms
from nemo_rod.lab.report.results import Results
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
    times,
)

_MEASURES = {
    "adapt_loss": ("adaptation loss", decimals(3)),
    "val_forgetting": ("F_val", decimals(3)),
    "task_forgetting": ("task forgetting", decimals(3)),
    "replay_share": ("replay share", percent),
}


# gap: an arm's adaptation loss less that of the chord of fixed replay at equal F_val;
# kept: its gap over RoD's, for equal trained tokens
_CHEAPER = (
    Column("adapt_loss", "Adaptation loss (nats)", decimals(3)),
    Column("val_forgetting", "Forgetting F_val (nats)", decimals(3)),
    Column("replay_share", "Replay share", percent),
    Column("gap", "Against fixed replay of equal F_val (nats)", signed(4)),
    Column("kept", "Kept of RoD's gain", percent),
)


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


def budgets_table(results: Results) -> Table:
    """Returns arms that were also trained with other budgets, with their variants, by budget."""
    arms = results["arms"]
    names = [name for path in continued(arms) for name in path]
    columns = (
        ARM,
        Column("budget", "Budget", times),
        Column("adapt_loss", "Adaptation loss (nats)", decimals(4)),
        Column("val_forgetting", "Forgetting F_val (nats)", decimals(4)),
    )
    rows = [{**arms[name], "arm": name, "budget": arms[name]["design"]["budget"]} for name in names]
    return Table("budgets", columns, tuple(rows))


def transfer_table(results: Results) -> Table:
    """Returns arms with another model's curriculum or references, beside the main arms."""
    arms = results["arms"]
    names = helped(arms)
    beside = filter_kinds(arms, "no_replay", "fixed", "rod")
    columns = (
        ARM,
        Column("curriculum", "Curriculum of", is_text=True),
        Column("references", "References", is_text=True),
        *(Column(key, _MEASURES[key][0], _MEASURES[key][1]) for key in list(_MEASURES)[:3]),
    )
    rows = []
    for name in [*beside, *names] if names else []:
        design = arms[name]["design"] or {}
        references = ", ".join(design.get("references") or []) or None
        borrowed = {"curriculum": design.get("curriculum"), "references": references}
        rows.append({**arms[name], "arm": name, **borrowed})
    return Table("transfer", columns, tuple(rows))


def base_loss_table(results: Results) -> Table:
    """Returns the base model's loss on replay data, by category or source, and overall."""
    loss = results["base_loss_by_source"] or {}
    counts = results["sources"]["replay"]
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


def cheaper_table(results: Results) -> Table:
    """Returns RoD and every arm that scores less: means over seeds, and their range.

    Shows the cost of each, and the share of RoD's gain that it keeps.
    """
    runs = [results, *results["replicates"]]
    by_run: list[dict[str, dict[str, Any]]] = []
    for run in runs:
        arms, comparisons = run["arms"], run["comparisons"]
        rod = arms.get("rod")
        by_run.append({})
        for name in cheaper(arms):
            arm, gap = arms[name], comparisons[name]["gap"]
            keys = ("compute", "adapt_loss", "val_forgetting", "replay_share")
            row = {key: arm[key] for key in keys}
            row |= {"scored": scored_share(arm), "gap": gap, "kept": None}
            if rod and gap is not None and rod["trained_tokens"] == arm["trained_tokens"]:
                whole = comparisons["rod"]["gap"]
                if whole is not None and whole < 0:  # None: RoD lies beyond the chord
                    row["kept"] = gap / whole
            by_run[-1][name] = row
    rows = []
    for name in in_order(name for run in by_run for name in run):
        values = [run[name] for run in by_run if name in run]
        row = {"arm": name, "scored": values[0]["scored"], "compute": values[0]["compute"]}
        for key in (column.key for column in _CHEAPER):
            row[key], row[f"{key}_range"] = mean_and_range(value.get(key) for value in values)
        rows.append(row)
    columns = [
        ARM,
        Column("scored", "Of the candidates is scored", percent),
        Column("compute", "Work (plain steps)", decimals(0)),
    ]
    for measure in _CHEAPER:
        title = measure.title + (", mean" if len(runs) > 1 else "")
        columns.append(replace(measure, title=title))
        spread = f"{measure.key}_range"
        if any(row.get(spread) is not None for row in rows):
            is_detail = measure.key not in ("gap", "kept")
            columns.append(Column(spread, "Range", _unsigned(measure.show), is_detail=is_detail))
    return Table("cheaper", tuple(columns), tuple(rows))


def _unsigned(show: Format) -> Format:
    return lambda value: show(value).lstrip("+")


PAPER_TABLES = (
    paper_table, budgets_table, transfer_table, base_loss_table, capabilities_table, cheaper_table,
)  # fmt: skip
