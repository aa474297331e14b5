"""The report as one HTML file, without scripts or requests, figures inlined as SVG.

Every figure is included twice, drawn for desktops and for phones; the style sheet shows one of
them, in colours for a light or a dark theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nemo_rod.report import table
from nemo_rod.report.arm_names import parse_arm
from nemo_rod.report.captions import TITLES, caption
from nemo_rod.report.cheaper import cheaper_table
from nemo_rod.report.paper import title_of
from nemo_rod.report.paper_tables import paper_table
from nemo_rod.report.style import COLOURS, arm_colour, css_variables
from nemo_rod.report.summary import summarise
from nemo_rod.report.table import typeset

Results = Mapping[str, Any]
Pictures = Mapping[str, tuple[str, str]]  # name -> SVG for desktops, SVG for phones

_STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", sans-serif; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--ink); font: 17px/1.55 var(--font); }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.15; letter-spacing: -0.02em; margin: 0; }
h2 { font-size: 1.3rem; letter-spacing: -0.01em; margin: 3.2rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 44rem; }
.sub, figcaption, .small { color: var(--muted); font-size: 0.92rem; }
.summary { font-size: 1.1rem; max-width: 48rem; margin: 1.2rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.8rem;
  margin: 1.8rem 0 0; padding: 0; }
.tile { border: 1px solid var(--grid); border-radius: 10px; padding: 0.8rem 1rem; }
.tile dt { color: var(--muted); font-size: 0.85rem; line-height: 1.35; }
.tile dd { margin: 0.15rem 0 0; font-size: 1.6rem; font-weight: 600; letter-spacing: -0.02em; }
figure { margin: 0.4rem 0 0; }
figcaption { max-width: 44rem; margin-top: 0.4rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
svg text { paint-order: stroke; stroke: var(--surface); stroke-width: 2.5px;
  font-variant-numeric: tabular-nums; }
.phone { display: none; }
.scroll { overflow-x: auto; margin: 0.8rem 0 0; -webkit-overflow-scrolling: touch; }
table { border-collapse: separate; border-spacing: 0; width: 100%;
  font-size: 0.88rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; text-align: left;
  min-width: 4.6rem; }
th, td { padding: 0.45rem 0.9rem 0.45rem 0; border-bottom: 1px solid var(--grid);
  text-align: left; vertical-align: top; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--surface);
  min-width: 8.5rem; }
sub { line-height: 0; font-size: 0.75em; }
.costs { margin-top: 1.8rem; }
.num { text-align: right; white-space: nowrap; }
thead th.num { text-align: right; }
thead .num { white-space: normal; }
.mark { display: inline-block; width: 0.6em; height: 0.6em; border-radius: 50%;
  margin-right: 0.5em; }
.checks { list-style: none; margin: 0.8rem 0 0; padding: 0; }
.check { display: grid; grid-template-columns: 6.6rem 1fr auto; gap: 0.1rem 1rem;
  padding: 0.6rem 0; border-bottom: 1px solid var(--grid); align-items: baseline; }
.check .value { text-align: right; font-variant-numeric: tabular-nums; }
.check .value small, .check .note { color: var(--muted); font-size: 0.85rem; }
.check .note { grid-column: 2 / -1; }
.verdict { font-weight: 600; white-space: nowrap; }
.holds { color: var(--max-replay); } .fails { color: var(--rod); }
.open { color: var(--muted); font-weight: 500; }
dl.words { display: grid; grid-template-columns: 12rem 1fr; gap: 0.4rem 1rem; font-size: 0.92rem; }
dl.words dt { font-weight: 500; } dl.words dd { margin: 0; color: var(--muted); }
@media (max-width: 640px) {
  body { font-size: 16px; } main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.6rem; } .summary { font-size: 1rem; }
  .desktop { display: none; } .phone { display: block; }
  .check { grid-template-columns: 1fr auto; }
  .check .claim { grid-column: 1 / -1; grid-row: 1; } .check .note { grid-column: 1 / -1; }
  dl.words { grid-template-columns: 1fr; gap: 0; } dl.words dd { margin-bottom: 0.6rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
}
@media print { .scroll { overflow: visible; } }
"""

_WORDS = (
    ("Adaptation loss", "Held-out loss on the new domain, weighted by the sources' blocks."),
    (
        "Forgetting F_val",
        "Rise of held-out loss over the base model on each replay source, at least zero, weighted "
        "by the sources' blocks. The column with sources alike weighs all the same.",
    ),
    (
        "Chord",
        "Adaptation loss of fixed replay (no replay included, a share of zero) as a function of "
        "ln F_val, straight between arms; beyond them the last piece goes on and is marked "
        "extrapolated.",
    ),
    (
        "Plain step",
        "The compute of one update on one batch without scoring. A forward pass over that batch "
        "counts a third of it.",
    ),
    (
        "Sampling ratio",
        "A source's share of the replay blocks trained on over its share of the replay candidates.",
    ),
    ("Slope", "Of the line that fits forgetting per source against forgetting without replay."),
)


def render_page(results: Results, pictures: Pictures) -> str:
    """Returns the whole page.

    Args:
        results: Content of `results.json`, with checks and replicates.
        pictures: Inline SVGs by figure name; missing figures are left out.
    """
    style = _STYLE.replace("LIGHT", css_variables(0)).replace("DARK", css_variables(1))
    title = f"Replay on Demand: {results['recipe']}"
    sections = [
        _header(results),
        _checks(results),
        _section(TITLES["frontier"], _figure("frontier", results, pictures)),
        _arms(results),
        *(
            _section(title, _figure(name, results, pictures))
            for name, title in TITLES.items()
            if name != "frontier"
        ),
        _cheaper(results),
        _paper(results),
        _sources(results),
        _seeds(results),
        _footer(results),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _figure(name: str, results: Results, pictures: Pictures) -> str:
    if name not in pictures:
        return ""
    desktop, phone = pictures[name]
    return (
        f'<figure>\n<div class="desktop">{desktop}</div>\n<div class="phone">{phone}</div>\n'
        f"<figcaption>{typeset(caption(name, results))}</figcaption>\n</figure>"
    )


def _header(results: Results) -> str:
    runs = [results, *results["replicates"]]
    seeds = [str(run["seed"]) for run in runs if run["seed"] is not None]
    words = [f"{len(results['arms'])} arms"]
    if seeds:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    tiles = "".join(
        f'<div class="tile"><dt>{typeset(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in _tiles(results)
    )
    return (
        f"<header>\n<h1>Replay on Demand: {escape(results['recipe'])}</h1>\n"
        f'<p class="sub">{escape(" · ".join(words))}</p>\n'
        f'<p class="summary">{typeset(summarise(results))}</p>\n'
        + (f'<dl class="tiles">{tiles}</dl>\n' if tiles else "")
        + "</header>"
    )


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


def _checks(results: Results) -> str:
    checks = table.checks_table(results)
    columns = {column.key: column for column in checks.columns}
    measured = [key for key in columns if key.startswith("measured")]
    items = []
    for row in checks.rows:
        css = {"holds": "holds", "fails": "fails"}.get(row["verdict"], "open")
        values = [columns[key].show(row[key]) for key in measured if row.get(key) is not None]
        aside = "" if row["kind"] == "claim" else f" ({row['kind']})"
        note = f'<span class="note">{typeset(row["note"])}</span>' if row["note"] else ""
        items.append(
            f'<li class="check"><span class="verdict {css}">{escape(row["verdict"])}</span>'
            f'<span class="claim">{typeset(row["claim"] + aside)}</span>'
            f'<span class="value">{escape(", ".join(values))} '
            f"<small>{escape(columns['bound'].show(row['bound']))}</small></span>{note}</li>"
        )
    text = (
        '<p class="small">Measured numbers with the bound they should keep; the bounds were set '
        "from repeated runs of a small recipe. Informative ones are too noisy or too much a matter "
        "of the setting to promise; a limitation is expected to fail for small models that are far "
        "from converged.</p>"
    )
    body = f'{text}<ul class="checks">{"".join(items)}</ul>'
    return _section("What holds, and what does not", body)


def _arms(results: Results) -> str:
    names = [parse_arm(name) for name in results["arms"]]
    role_of = {colours[0]: role for role, colours in COLOURS.items()}
    marks = {arm.name: f"var(--{role_of[arm_colour(arm, names)]})" for arm in names}
    text = (
        '<p class="small">RoD is compared with fixed replay twice: at equal trained tokens, where '
        "its scoring comes on top, and at equal compute, where fewer updates make up for it. Below "
        "zero is better than fixed replay of equal forgetting.</p>"
    )
    return _section("All arms", text + table.arms_table(results).to_html(marks) + _costs(results))


def _costs(results: Results) -> str:
    costs = table.costs_table(results)
    if not costs.rows:
        return ""
    return (
        '<p class="small costs">Where the compute goes, in plain steps. The '
        "specialist and the reference losses are needed once for all arms of a setting and are not "
        "part of an arm's compute above.</p>" + costs.to_html()
    )


def _cheaper(results: Results) -> str:
    arms = cheaper_table(results)
    if not arms.rows:
        return ""
    text = (
        '<p class="small">Arms that score less of their candidates. What one keeps is its gain, '
        "its distance below fixed replay of equal forgetting, over RoD's, where both trained on as "
        "many tokens. The last columns are of RoD's own steps: what share of the chosen blocks "
        "scoring the same prefix would have chosen, too, how much more replay, and Spearman's "
        "correlation of its scores with those of whole candidates.</p>"
    )
    return _section("Cheaper scoring", text + arms.to_html())


def _paper(results: Results) -> str:
    rows = paper_table(results)
    text = (
        f'<p class="small">This setting is the paper\'s, which calls it '
        f"{escape(title_of(results['recipe']))}; it ran every arm once.</p>"
    )
    return _section("Beside the paper's numbers", text + rows.to_html()) if rows.rows else ""


def _sources(results: Results) -> str:
    sources = table.sources_table(results)
    return _section("Replay sources", sources.to_html()) if sources.rows else ""


def _seeds(results: Results) -> str:
    return _section("Seeds", table.seeds_table(results).to_html()) if results["replicates"] else ""


def _footer(results: Results) -> str:
    words = "".join(f"<dt>{typeset(name)}</dt><dd>{typeset(text)}</dd>" for name, text in _WORDS)
    notes = "".join(f'<p class="small">{typeset(note)}</p>' for note in results["notes"])
    files = (
        '<p class="small">The numbers are in <code>results.json</code> and <code>tables/</code>, '
        "the pictures in <code>figures/</code>, next to this page.</p>"
    )
    return _section("Words", f'<dl class="words">{words}</dl>{notes}{files}')
