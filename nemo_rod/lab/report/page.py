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
    missing = [part.label for part in parts if part.state != "done"]
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
        block_losses=(results or {}).get("block_losses"),
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
        **(_outcome(results) if results else _NO_OUTCOME),
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


def _outcome(results: Results) -> dict[str, Any]:
    """Returns the template's values on the results."""
    runs, verdict = [results, *results["replicates"]], results["verdict"]
    names = list(results["arms"])
    role_of = {colours[0]: role for role, colours in COLOURS.items()}
    seeds = [str(run["seed"]) for run in runs if run["seed"] is not None]
    subtitle = f"{len(names)} arms"
    if seeds:
        subtitle += f" · seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
    return {
        "subtitle": subtitle,
        "summary": summarise(results),
        "advice": verdict["advice"] if verdict else "",
        "comparisons": sentences(verdict) if verdict else [],
        "marks": {name: f"var(--{role_of[arm_colour(name, names)]})" for name in names},
        "notes": results["notes"],
        "paper_title": title_of(results["recipe"]),
        "disagreements": [
            text for run in [*runs, *results["settings"]] for text in run["disagreements"]
        ],
        "completions": results.get("completions", []),
        "labels": {name: parse_arm(name).label for name in names},
    }


def summarise(results: Results) -> str:
    """Returns plain sentences on what RoD, or a watched job, came to; `verdict.py` compares it."""
    arms = results["arms"]
    if (arm := arms.get("rod") or arms.get("watched")) is None:
        return "RoD was not run, so there is nothing to compare the baselines with yet."
    measures = {"held-out loss on new text": "adapt_loss", "forgetting F_val": "val_forgetting"}
    said = [
        f"an unknown {what}" if arm[key] is None else f"a {what} of {arm[key]:.3f} nats per token"
        for what, key in measures.items()
    ]
    subject = "RoD" if "rod" in arms else "The job, which is watched and chooses nothing,"
    text = f"{subject} has {' and '.join(said)}."
    if "rod" in arms and arm["replay_share"] is not None:
        text += f" Its replay share is not a setting: it averages {100 * arm['replay_share']:.0f} %"
        if deciles := arm["share_by_decile"]:
            text += f", from {100 * deciles[0]:.0f} % in the first tenth of the run to "
            text += f"{100 * deciles[-1]:.0f} % in the last"
        text += "."
    return text
