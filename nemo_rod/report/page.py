"""The report as one HTML file, without scripts or requests, figures inlined as SVG.

Markup, style and fixed prose are in the template `page.html`; what it fills in is prepared here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rod.report import table
from nemo_rod.report.arm_names import parse_arm
from nemo_rod.report.cheaper import cheaper_table
from nemo_rod.report.paper import paper_arms, title_of
from nemo_rod.report.paper_tables import paper_table
from nemo_rod.report.style import COLOURS, arm_colour, css_variables
from nemo_rod.report.summary import summarise
from nemo_rod.report.templates import environment
from nemo_rod.report.under_way import Part

Results = Mapping[str, Any]
Pictures = Mapping[str, tuple[str, str]]  # name -> SVG for desktops, SVG for phones


def render_page(
    results: Results, pictures: Pictures, parts: Sequence[Part] = (), *, explorer: bool = False
) -> str:
    """Returns the whole page.

    Args:
        results: Content of `results.json`, with checks and replicates.
        pictures: Inline SVGs by figure name; missing figures are left out.
        parts: What the run makes; shown if some of it is missing.
        explorer: Whether there is a curriculum explorer to lead to.
    """
    page = environment().get_template("page.html")
    disagreements = [text for run in _runs(results) for text in run["disagreements"]]
    return page.render(
        _header(results), **_body(results), **_standing(parts), disagreements=disagreements,
        pictures=pictures, explorer=explorer,
    )  # fmt: skip


def render_under_way(
    recipe: str, parts: Sequence[Part], figure: tuple[str, str] | None, *, explorer: bool
) -> str:
    """Returns the page of a run of which no arm has been evaluated yet.

    Args:
        recipe: Name of the recipe.
        parts: What the run makes.
        figure: Inline SVG of how training goes, for desktops and for phones; None without a step.
        explorer: Whether there is a curriculum explorer to lead to.
    """
    page = environment().get_template("under_way.html")
    return page.render(
        recipe=recipe, figure=figure, explorer=explorer, disagreements=[], **_standing(parts),
        light=css_variables(0), dark=css_variables(1),
    )  # fmt: skip


def _runs(results: Results) -> list[Results]:
    return [results, *results["replicates"], *results.get("settings", [])]


def _standing(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns what there is and what is missing; nothing of a run that is complete."""
    missing = [part.label for part in parts if part.is_missing]
    return {
        "standing": list(parts) if missing else [],
        "missing": ", ".join(missing),
        "as_of": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _header(results: Results) -> dict[str, Any]:
    runs = [results, *results["replicates"]]
    seeds = [str(run["seed"]) for run in runs if run["seed"] is not None]
    words = [f"{len(results['arms'])} arms"]
    if seeds:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    return {
        "light": css_variables(0),
        "dark": css_variables(1),
        "recipe": results["recipe"],
        "subtitle": " · ".join(words),
        "summary": summarise(results),
        "tiles": _tiles(results),
    }


def _tiles(results: Results) -> list[tuple[str, str]]:
    checks = {check["id"]: check["measured"] for check in results["checks"]}
    rod = results["arms"].get("rod", {})
    comparison = results["comparisons"].get("rod", {})
    reference = parse_arm(results["reference_arm"] or "").label
    tiles = [
        (f"forgetting, relative to {reference}", checks["forgetting_ratio"], table.times),
        (
            "adaptation loss against fixed replay of equal forgetting (nats)",
            checks["chord_gap"],
            table.signed(3),
        ),
        ("mean replay share, emergent", rod.get("replay_share"), table.percent),
        ("compute, relative to fixed replay", comparison.get("compute_ratio"), table.times),
    ]
    return [(name, show(value)) for name, value, show in tiles if value is not None]


def _body(results: Results) -> dict[str, Any]:
    """Returns checks, tables and notes, and what captions say of these results."""
    base = results["arms"].get("base") or {"adapt_loss": None}
    names = [parse_arm(name) for name in results["arms"]]
    role_of = {colours[0]: role for role, colours in COLOURS.items()}
    return {
        "checks": _checks(results),
        "arms_table": table.arms_table(results),
        "marks": {arm.name: f"var(--{role_of[arm_colour(arm, names)]})" for arm in names},
        "costs_table": table.costs_table(results),
        "cheaper_table": cheaper_table(results),
        "paper_table": paper_table(results),
        "sources_table": table.sources_table(results),
        "seeds_table": table.seeds_table(results),
        "notes": results["notes"],
        "base_loss": None if base["adapt_loss"] is None else f"{base['adapt_loss']:.3f}",
        "is_papers": bool(paper_arms(results["recipe"])),
        "paper_title": title_of(results["recipe"]),
        "without": results["profile"].get("rod", {}).get("without")
        or "the most influential source",
    }


def _checks(results: Results) -> list[dict[str, str]]:
    checks = table.checks_table(results)
    bound = next(column for column in checks.columns if column.key == "bound")
    measured = [column for column in checks.columns if column.key.startswith("measured")]
    return [
        {
            "verdict": row["verdict"],
            "css": row["verdict"] if row["verdict"] in ("holds", "fails") else "open",
            "claim": row["claim"] + ("" if row["kind"] == "claim" else f" ({row['kind']})"),
            "measured": ", ".join(text for column in measured if (text := column.cell(row))),
            "bound": bound.cell(row),
            "note": row["note"],
        }
        for row in checks.rows
    ]
