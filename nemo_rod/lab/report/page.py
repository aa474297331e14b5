"""The report as one HTML file that requests nothing, with the library that draws its pictures.

Markup, style and fixed prose are in the Jinja2 templates beside this file; their values are
prepared here.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rod.lab.report import table
from nemo_rod.lab.report.figures.drawing import converting, views_of, with_variables
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.paper import title_of
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.style import COLOURS, arm_colour
from nemo_rod.lab.report.under_way import Part
from nemo_rod.lab.report.verdict import sentences
from nemo_rod.lab.report.verdicts import check_rows, is_calibrated
from nemo_rod.selection.arm_names import parse_arm

_NO_OUTCOME = {"subtitle": "under way, no arm evaluated yet", "disagreements": []}


def render(template: str, **values: Any) -> str:
    """Returns a page from a template; values are escaped, and an undefined value is an error."""
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
    # JSON for a `<script>`, which no text in it can close
    closing = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<\u2028\u2029"})
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    environment.filters["script"] = lambda data: Markup(encoder.encode(data).translate(closing))
    for theme, name in enumerate(("light", "dark")):
        values[name] = " ".join(f"--{role}: {pair[theme]};" for role, pair in COLOURS.items())
    return environment.get_template(template).render(values)


def render_page(
    recipe: str,
    results: Results | None,
    tables: Mapping[str, table.Table],
    pictures: Mapping[str, tuple[Picture, Sequence[str]]],
    parts: Sequence[Part],
    *,
    explorers: Sequence[tuple[str, str]],
    provenance: Mapping[str, Any],
) -> str:
    """Returns the whole page, with the results so far.

    Without results, before any evaluation; tables without rows are left out, and parts are shown if
    one is missing. Pictures are by name, each with the names of its files.
    """
    missing = [part.label for part in parts if part.is_missing]
    specs, shown = [], []
    for name, (picture, names) in sorted(pictures.items(), key=lambda item: item[1][0].order):
        views = views_of(picture.figure)
        ids = [f"{name}-{number}" for number in range(len(views))]
        specs += [{"id": key, "spec": view} for key, view in zip(ids, views, strict=True)]
        shown.append((name, picture, ids, names))
    page = render(
        "page.html",
        recipe=recipe,
        is_evaluated=results is not None,
        tables=tables,
        pictures=shown,
        has_curves=any(name.startswith("curve-") for name in pictures),
        specs=with_variables(specs),
        explorers=explorers,
        provenance=provenance,
        vega=_bundle() if specs else "",
        standing=list(parts) if missing else [],
        missing=", ".join(missing),
        as_of=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        **(_outcome(results, tables) if results else _NO_OUTCOME),
    )
    headings = re.findall(r'<section id="([^"]+)"[^>]*>\s*<h2>(.*?)</h2>', page)
    links = "\n".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in headings)
    return page.replace("<!-- contents -->", links)


@functools.cache
def _bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script that requests nothing; "" without it."""
    if (converter := converting()) is None:
        return ""
    bundle = str(converter.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return bundle.replace("</script", "<\\/script")


def _outcome(results: Results, tables: Mapping[str, table.Table]) -> dict[str, Any]:
    """Returns the template's values on the results."""
    runs = [results, *results["replicates"]]
    rod, comparison = (results[key].get("rod", {}) for key in ("arms", "comparisons"))
    names = list(results["arms"])
    role_of = {colours[0]: role for role, colours in COLOURS.items()}
    seeds = [str(run["seed"]) for run in runs if run["seed"] is not None]
    subtitle = f"{len(names)} arms"
    if seeds:
        subtitle += f" · seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
    measured = {check["id"]: check["measured"] for check in results["checks"]}
    reference = parse_arm(results["reference_arm"] or "").label
    against = "adaptation loss against fixed replay of equal forgetting (nats)"
    tiles = [
        (f"forgetting, relative to {reference}", measured["forgetting_ratio"], table.times),
        (against, measured["chord_gap"], table.signed(3)),
        ("mean replay share, emergent", rod.get("replay_share"), table.percent),
        ("compute, relative to fixed replay", comparison.get("compute_ratio"), table.times),
    ]
    columns = tables["checks"].columns
    numbers = [column for column in columns if column.key.startswith("measured_")]
    checks = [
        {column.key: column.cell(row) for column in columns}
        | {"measured": ", ".join(filter(None, (column.cell(row) for column in numbers)))}
        for row in tables["checks"].rows
    ]
    return {
        "subtitle": subtitle,
        "summary": summarise(results),
        "tiles": [(name, show(value)) for name, value, show in tiles if value is not None],
        "checks": checks,
        "marks": {name: f"var(--{role_of[arm_colour(name, names)]})" for name in names},
        "notes": results["notes"],
        "paper_title": title_of(results["recipe"]),
        "disagreements": [
            text for run in [*runs, *results["settings"]] for text in run["disagreements"]
        ],
        "completions": results.get("completions", []),
        "labels": {name: parse_arm(name).label for name in names},
        "is_judged": is_calibrated(results["recipe"])
        and any(check["verdict"] in ("holds", "fails") for check in results["checks"]),
    }


def summarise(results: Results) -> str:
    """Returns plain sentences on the outcome, the failed claims and those not judged."""
    rod = results["arms"].get("rod")
    comparison = results["comparisons"].get("rod", {})
    checks = {check["id"]: check for check in results["checks"]}
    measured = {name: check["measured"] for name, check in checks.items()}
    if rod is None:
        text = ["RoD was not run, so there is nothing to compare the baselines with yet."]
    elif rod["val_forgetting"] is None:
        why = "The base model was not evaluated"
        if "base" in results["arms"]:
            why = "No held-out loss of replay was measured"
        text = [f"{why}, so the arms' forgetting is unknown."]
    elif rod["adapt_loss"] is None:  # a job whose validation split has no new data
        text = [
            f"RoD's forgetting F_val is {rod['val_forgetting']:.3f} nats per token; no held-out "
            "loss of adaptation was measured."
        ]
    else:
        text = [
            f"RoD reaches an adaptation loss of {rod['adapt_loss']:.3f} nats per token and a "
            f"forgetting F_val of {rod['val_forgetting']:.3f} nats per token."
        ]

    if verdict := results["verdict"]:
        text += [*sentences(verdict), verdict["advice"]]
    if not is_calibrated(results["recipe"]):
        return " ".join([*text, *_share(rod)])
    side = {True: "below", False: "above"}
    against_fixed = []
    if (ratio := measured["forgetting_ratio"]) is not None:
        less = f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'}".replace("%", " %")
        reference = parse_arm(results["reference_arm"]).label
        against_fixed.append(f"at equal trained tokens it forgets {less} than {reference}")
    if (gap := measured["chord_gap"]) is not None:
        against_fixed.append(
            f"its adaptation loss is {abs(gap):.3f} nats {side[gap < 0]} fixed replay of equal "
            "forgetting"
            + (" (extrapolated beyond the fixed arms)" if comparison["extrapolated"] else "")
        )
    if against_fixed:
        sentence = ", and ".join(against_fixed)
        text.append(sentence[:1].upper() + sentence[1:] + ".")

    text += _share(rod)
    ratio = comparison.get("compute_ratio")
    if ratio and comparison["same_tokens"]:  # else some of it is for more or fewer updates
        text.append(f"RoD's scoring makes each of its runs cost {ratio:.2f} times as much.")
    check, averages = checks["compute_matched_gap"], measured["averages_gap"]
    if check["measured"] is None:
        if rod is not None:
            text.append(f"How RoD fares at equal compute was not judged ({check['note']}).")
    elif check["verdict"] != "fails":
        nats = abs(check["measured"])
        text.append(f"At equal compute it is still {nats:.3f} nats below fixed replay.")
    else:
        text.append(
            "At equal compute it loses to fixed replay: scoring leaves it fewer updates, and its "
            f"adaptation loss ends {check['measured']:.3f} nats above fixed replay's."
        )
        if averages is not None:
            text.append(
                "With scores estimated from averages by source, which need no scoring pass, it "
                f"ends {abs(averages):.3f} nats {side[averages < 0]} it."
            )

    return " ".join([*text, *_claims(results)])


def _share(rod: Results | None) -> list[str]:
    """Returns a sentence on RoD's share of replay, if it is known."""
    if rod is None or rod["replay_share"] is None:
        return []
    share = f"Its replay share is not a setting: it averages {100 * rod['replay_share']:.0f} %"
    if deciles := rod["share_by_decile"]:
        share += f", from {100 * deciles[0]:.0f} % in the first tenth of the run to "
        share += f"{100 * deciles[-1]:.0f} % in the last"
    return [share + "."]


def _claims(results: Results) -> list[str]:
    """Returns sentences on the claims that hold, those that fail and those not judged."""
    rows = [row for row in check_rows(results) if row["kind"] == "claim"]
    held, failed, open_ = (
        [row["claim"] for row in rows if row["verdict"] == verdict]
        for verdict in ("holds", "fails", "not judged")
    )
    judged, num_runs = len(held) + len(failed), 1 + len(results["replicates"])
    is_whole = all(None not in row["measured"] for row in rows if row["verdict"] == "holds")
    where = f"each of {num_runs} runs" if is_whole else "each run where they were judged"
    in_runs = f" in {where}" if num_runs > 1 else ""
    if not judged:
        return ["No claim could be judged."]
    if failed:
        text = [
            f"Of the {judged} claims that could be judged, {len(held)} hold{in_runs}.",
            "These fail: " + "; ".join(failed) + ".",
        ]
    elif judged > 1:
        text = [f"All {judged} claims that could be judged hold{in_runs}."]
    else:
        text = [f"The claim that could be judged holds{in_runs}."]
    if open_:
        text.append("Not judged: " + "; ".join(open_) + ".")
    return text
