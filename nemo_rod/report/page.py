"""The report as one HTML file, without scripts or requests, figures inlined as SVG.

Markup, style and fixed prose are in the template `page.html`; what it fills in is prepared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rod.report import table
from nemo_rod.report.arm_names import parse_arm
from nemo_rod.report.cheaper import cheaper_table
from nemo_rod.report.paper import paper_arms, title_of
from nemo_rod.report.paper_tables import paper_table
from nemo_rod.report.style import COLOURS, arm_colour, css_variables
from nemo_rod.report.summary import summarise

Results = Mapping[str, Any]
Pictures = Mapping[str, tuple[str, str]]  # name -> SVG for desktops, SVG for phones


def render_page(results: Results, pictures: Pictures) -> str:
    """Returns the whole page.

    Args:
        results: Content of `results.json`, with checks and replicates.
        pictures: Inline SVGs by figure name; missing figures are left out.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    subscript = Markup("F<sub>val</sub>")
    environment.filters["typeset"] = lambda text: escape(text).replace("F_val", subscript)
    page = environment.get_template("page.html")
    return page.render(_header(results), **_body(results), pictures=pictures)


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
