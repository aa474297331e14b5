"""Interactive curves of training for the page, in Vega-Lite.

The specifications are in the light colours of `style.py`; `curves.js` replaces them by those of the
reader's theme. The libraries are packed into the page, which then needs no network.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from nemo_rod.lab.report.run_files import held_out_losses
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.lab.report.under_way import Part
from nemo_rod.roles import ROLES

Row = dict[str, Any]
Chart = dict[str, Any]

_MAX_POINTS = 240  # of a curve; bounds the page
_SMOOTHED = 0.02  # half the window of a smoothed line, as a share of its points
_OURS = {"train", "rod", "validation", "timing", "throughput", "memory"}  # groups of metrics
_STEPS, _HOURS = "steps done", "hours of training"


@functools.cache
def vega_bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script that requests nothing."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def charts_of(parts: Sequence[Part], names: Sequence[str] = ()) -> list[Chart]:
    """Returns the charts that the parts of a run have metrics for.

    Args:
        parts: parts of the run. The base, which is trained longer, has a chart of its own.
        names: arms with colours in the figures of the page, so that the curves have the same.

    Returns:
        For each chart its `id`, `title`, `note` and Vega-Lite `spec`.
    """
    trained = [part for part in parts if part.rows]
    arms = [part for part in trained if part.name != "base"]
    known = list(dict.fromkeys([*names, *(part.name for part in trained)]))
    colours = {part.label: arm_colour(part.name, known) for part in trained}
    loss, share = ("train/loss", "training loss"), ("rod/replay_share", "share of replay")
    base = [part for part in trained if part.name == "base"]
    roles = ROLES
    alike = {role: list(_held_out(arms, role, by_source=False)) for role in roles}
    made = [
        _lines("loss", "Training loss", _metric(arms, *loss), colours, smooth=True),
        _lines("share", "Share of replay", _metric(arms, *share), colours, smooth=True),
        *(
            _lines(f"held_out_{role}", f"Held-out {role} loss, sources alike", rows, colours)
            for role, rows in alike.items()
        ),
        _lines(
            "hours", "Held-out adaptation loss against time", alike["adaptation"], colours,
            x=_HOURS,
        ),
        _lines(
            "sources", "Held-out loss by source",
            [row for role in roles for row in _held_out(arms, role)],
            colours, facet="source",
        ),
        _quantiles(arms),
        *(
            _lines(re.sub(r"\W", "_", key), key, _metric(arms, key, key), colours, smooth=True)
            for key in _of_packages(arms)
        ),
        _lines("base", "The base: training loss", _metric(base, *loss), colours, smooth=True),
    ]  # fmt: skip
    return [chart for chart in made if chart]


def _of_packages(parts: Sequence[Part]) -> list[str]:
    """Returns the metrics of steps that packages have registered."""
    keys = dict.fromkeys(key for part in parts for row in part.rows for key in row)
    return [key for key in keys if "/" in key and key.partition("/")[0] not in _OURS]


def _metric(parts: Sequence[Part], key: str, name: str) -> list[Row]:
    """Returns a metric of the parts' steps, as means of neighbouring steps."""
    rows = []
    for part in parts:
        hours = _hours(part)
        known = [(t, i) for i, t in enumerate(part.rows) if t.get(key) is not None]
        known = [(t, i) for t, i in known if math.isfinite(t[key])]  # JSON has no NaN
        for some in np.array_split(np.arange(len(known)), min(len(known), _MAX_POINTS) or 1):
            if len(some):
                last, values = known[some[-1]], [float(known[i][0][key]) for i in some]
                row = {"arm": part.label, _STEPS: last[0]["step"] + 1, "value": _short(values)}
                rows.append(row | {"metric": name} | _at(hours, last[1]))
    return rows


def _held_out(parts: Sequence[Part], role: str, *, by_source: bool = True) -> Iterator[Row]:
    """Yields held-out losses from before the first step on, by source or as their mean."""
    for part in parts:
        hours = _hours(part)
        for place, row in enumerate([part.start | {"step": -1}, *part.rows], start=-1):
            values = held_out_losses(row, role)
            here = {"arm": part.label, _STEPS: row["step"] + 1} | _at(hours, place)
            if by_source:
                for source, value in values.items():
                    yield here | {"source": f"{source} ({role})", "value": _short([value])}
            elif values:
                yield here | {"value": _short(list(values.values()))}


def _hours(part: Part) -> list[float] | None:
    """Returns the hours of training after every step; None if a step's time is unknown."""
    seconds = [row.get("timing/train/total") for row in part.rows]
    return None if None in seconds else list(accumulate(s / 3600 for s in seconds if s is not None))


def _at(hours: list[float] | None, place: int) -> Row:
    return {} if hours is None else {_HOURS: _short([hours[place]]) if place >= 0 else 0.0}


def _short(values: Sequence[float]) -> float:
    """Returns the mean of some values to five digits."""
    return float(f"{sum(values) / len(values):.5g}")


def _lines(
    name: str,
    title: str,
    rows: list[Row],
    colours: dict[str, str],
    *,
    x: str = _STEPS,
    smooth: bool = False,
    facet: str = "",
) -> Chart | None:
    """Returns a chart of a line per arm; a smoothed one over the raw one, or one by `facet`."""
    rows = [row for row in rows if x in row and math.isfinite(row["value"])]
    if not rows:
        return None
    arms = [arm for arm in colours if any(row["arm"] == arm for row in rows)]
    of_arm: dict[str, Any] = {
        "field": "arm", "type": "nominal", "title": None,
        "legend": {
            "orient": "top", "columns": 4, "symbolType": "stroke", "symbolSize": 400,
            "symbolStrokeWidth": 2, "symbolOpacity": 1,
        },
    }  # fmt: skip
    paint = of_arm | {"scale": {"domain": arms, "range": [colours[arm] for arm in arms]}}
    encoding: dict[str, Any] = {
        "x": {"field": x, "type": "quantitative", "title": x, "scale": {"zero": False}},
        "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
        "color": paint,
        "opacity": {"condition": {"param": "picked", "value": 1}, "value": 0.12},
    }
    if len(set(paint["scale"]["range"])) < len(arms):  # variants of RoD have its colour
        encoding["strokeDash"] = of_arm | {"scale": {"domain": arms}}
    if name == "share":
        encoding["y"]["axis"] = {"format": "%"}
    faint = {"condition": {"param": "picked", "value": 0.3}, "value": 0.05}
    raw = {"mark": {"type": "line", "strokeWidth": 1}, "encoding": {"opacity": faint}}
    smoothed: dict[str, Any] = {"mark": {"type": "line", "strokeWidth": 2}}
    if smooth:
        longest = max(sum(row["arm"] == arm for row in rows) for arm in arms)
        half = max(1, round(_SMOOTHED * longest))
        smoothed["transform"] = [{
            "window": [{"op": "mean", "field": "value", "as": "smoothed"}],
            "groupby": ["arm"], "sort": [{"field": x}], "frame": [-half, half],
        }]  # fmt: skip
        smoothed["encoding"] = {"y": encoding["y"] | {"field": "smoothed"}}
    tips = [{"field": "arm"}, {"field": x}, {"field": "value", "format": ".4~g"}]
    # the nearest point of a line answers to the pointer
    points = {
        "mark": {"type": "point", "filled": True, "size": 50, "tooltip": True},
        "params": [{
            "name": "near",
            "select": {
                "type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout",
            },
        }],
        "encoding": {
            "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            "tooltip": tips,
        },
    }  # fmt: skip
    smoothed["params"] = [
        {"name": "picked", "select": {"type": "point", "fields": ["arm"]}, "bind": "legend"}
    ]
    view: dict[str, Any] = {
        "encoding": encoding,
        "layer": [*([raw] if smooth else []), smoothed, points],
    }
    if facet:
        view = {
            "facet": {"field": facet, "type": "nominal", "title": None}, "spec": view | _SIZE,
            "resolve": {"scale": {"y": "independent"}},
        }  # fmt: skip
    return {"id": f"curve-{name}", "title": title, "spec": _spec(rows, view)}


_SIZE = {"width": 560, "height": 240}


def _quantiles(arms: Sequence[Part]) -> Chart | None:
    """Returns a chart of both roles' median scores with the tenth and ninetieth percentile."""
    rows: list[Row] = []
    for part in arms:
        for role in ROLES:
            keys = [f"rod/rho_{role}_{percentile}" for percentile in ("p10", "p50", "p90")]
            low, middle, high = (_metric([part], key, role) for key in keys)
            rows += [
                {"arm": part.label, _STEPS: two[_STEPS], "role": role}
                | {"p10": one["value"], "p50": two["value"], "p90": three["value"]}
                for one, two, three in zip(low, middle, high, strict=False)
            ]
    if not rows:
        return None
    labels = sorted({row["arm"] for row in rows}, key=lambda label: (label != "RoD", label))
    score = {"type": "quantitative", "title": "score (nats per token)"}
    view = {
        "params": [{
            "name": "shown", "value": labels[0],
            "bind": {"input": "select", "options": labels, "name": "arm "},
        }],
        "transform": [{"filter": "datum.arm == shown"}],
        "encoding": {
            "x": {"field": _STEPS, "type": "quantitative", "title": _STEPS},
            "color": {
                "field": "role", "type": "nominal", "title": None, "legend": {"orient": "top"},
                "scale": {
                    "domain": ["adaptation", "replay"],
                    "range": [light("adaptation"), light("replay")],
                },
            },
        },
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.2},
                "encoding": {"y": score | {"field": "p10"}, "y2": {"field": "p90"}},
            },
            {
                "mark": {"type": "line", "strokeWidth": 2, "tooltip": {"content": "data"}},
                "encoding": {"y": score | {"field": "p50"}},
            },
        ],
    }  # fmt: skip
    title = "Scores: median, tenth and ninetieth percentile"
    return {"id": "curve-scores", "title": title, "spec": _spec(rows, view)}


def _spec(rows: list[Row], view: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole specification in the colours of the page."""
    axis = {
        "gridColor": light("grid"), "domainColor": light("rule"), "tickColor": light("rule"),
        "labelColor": light("muted"), "titleColor": light("muted"), "titleFontWeight": "normal",
    }  # fmt: skip
    text = {"labelColor": light("ink"), "labelFontSize": 12}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": light("surface"),
        "config": {"axis": axis, "legend": text, "header": text, "view": {"stroke": None}},
        "data": {"values": rows},
        **({} if "facet" in view else _SIZE),
        **view,
    }
