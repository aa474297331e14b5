"""The report as one HTML file, without scripts or requests, figures inlined as SVG.

Markup, style and fixed prose are in the template `page.html`; what it fills in is prepared here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rod.lab.report import table
from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.paper import paper_arms, title_of
from nemo_rod.lab.report.style import COLOURS, arm_colour
from nemo_rod.lab.report.summary import summarise
from nemo_rod.lab.report.templates import render
from nemo_rod.lab.report.under_way import Part

Results = Mapping[str, Any]
Pictures = Mapping[str, tuple[str, str]]  # name -> SVG for desktops, SVG for phones


def render_page(
    results: Results,
    tables: Mapping[str, table.Table],
    pictures: Pictures,
    parts: Sequence[Part],
    *,
    explorer: bool,
) -> str:
    """Returns the whole page.

    Args:
        results: Content of `results.json`, with checks and replicates.
        tables: Tables by name; empty ones are left out.
        pictures: Inline SVGs by figure name; missing figures are left out.
        parts: What the run makes; shown if some of it is missing.
        explorer: Whether there is a curriculum explorer to lead to.
    """
    runs = [results, *results["replicates"]]
    base = results["arms"].get("base") or {"adapt_loss": None}
    names = [parse_arm(name) for name in results["arms"]]
    role_of = {colours[0]: role for role, colours in COLOURS.items()}
    return render(
        "page.html",
        recipe=results["recipe"],
        subtitle=_subtitle(runs),
        summary=summarise(results),
        tiles=_tiles(results),
        checks=_checks(tables["checks"]),
        tables=tables,
        marks={arm.name: f"var(--{role_of[arm_colour(arm, names)]})" for arm in names},
        notes=results["notes"],
        base_loss=None if base["adapt_loss"] is None else f"{base['adapt_loss']:.3f}",
        is_papers=bool(paper_arms(results["recipe"])),
        paper_title=title_of(results["recipe"]),
        without=results["profile"].get("rod", {}).get("without") or "the most influential source",
        disagreements=[
            text for run in [*runs, *results["settings"]] for text in run["disagreements"]
        ],
        pictures=pictures,
        explorer=explorer,
        **_standing(parts),
    )


def render_under_way(
    recipe: str, parts: Sequence[Part], figure: tuple[str, str] | None, *, explorer: bool
) -> str:
    """Returns the page of a run of which no arm has been evaluated yet; see `render_page`.

    The figure, in two widths, is of how training goes; None without a step.
    """
    return render(
        "under_way.html", recipe=recipe, figure=figure, explorer=explorer, disagreements=[],
        **_standing(parts),
    )  # fmt: skip


def _standing(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns what there is and what is missing; nothing of a run that is complete."""
    missing = [part.label for part in parts if part.is_missing]
    return {
        "standing": list(parts) if missing else [],
        "missing": ", ".join(missing),
        "as_of": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _subtitle(runs: Sequence[Results]) -> str:
    seeds = [str(run["seed"]) for run in runs if run["seed"] is not None]
    words = [f"{len(runs[0]['arms'])} arms"]
    if seeds:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    return " · ".join(words)


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


def _checks(checks: table.Table) -> list[dict[str, str]]:
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
