"""Vega-Lite for the figures of a report: views in the house style, marks, axes, and files.

A figure is drawn in the light colours of `style.py`. Text is in points of the page; `narrow` is a
parameter of every specification, true on a phone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.lab.report.style import COLOURS, light

Spec = dict[str, Any]
Rows = list[dict[str, Any]]
Floats = npt.NDArray[np.float64]

WIDTH, HEIGHT, FONT_SIZE = 720, 320, 12  # width of files, height of a plot, size of text; pixels
STAR = (
    "M0,-1L.225,-.309L.951,-.309L.363,.118L.588,.809L0,.382L-.588,.809L-.363,.118L-.951,-.309"
    "L-.225,-.309Z"
)
CROSS = "M-1,-1L1,1M-1,1L1,-1"
_NAMED = 24  # characters of a label
# First digits of the ticks of a logarithmic axis, by the least ratio of its ends.
_DIGITS: dict[float, tuple[float, ...]] = {
    8: (1, 2, 5),
    2: (1, 1.5, 2, 3, 4, 5, 7),
    0: (1, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2, 2.2, 2.5, 2.8, 3.2, 3.6, 4, 4.5, 5, 5.6, 6.3, 7, 8, 9),
}


def number(field: str, title: str | None = None, **more: Any) -> Spec:
    """Returns the encoding of a number that need not begin at zero, with its axis' title."""
    scale = {"zero": False, "nice": False} | more.pop("scale", {})
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, **more}


def as_is(field: str) -> Spec:
    """Returns the encoding of a channel by values that are its colours, shapes or sizes."""
    return {"field": field, "scale": None, "type": "ordinal"}


def by_name(field: str, colours: Mapping[str, str], **legend: Any) -> Spec:
    """Returns the encoding of names by colours, with a legend above the plot."""
    legend = {"orient": "top", "columns": {"expr": "narrow ? 2 : 5"}, "labelLimit": 300} | legend
    return {
        "field": field, "type": "nominal", "title": None, "legend": legend,
        "scale": {"domain": [*colours], "range": [*colours.values()]},
    }  # fmt: skip


def layer(mark: str | Spec, rows: Rows | None = None, **encoding: Any) -> Spec:
    """Returns a layer of a view, over its own rows or over those of the view."""
    data = {} if rows is None else {"data": {"values": rows}}
    return {**data, "mark": mark, "encoding": encoding}


def line_at(value: float, axis: str = "y", colour: str = "rule", **mark: Any) -> Spec:
    """Returns a rule across the plot."""
    mark = {"type": "rule", "color": light(colour), "tooltip": None} | mark
    return layer(mark, [{}], **{axis: {"datum": value, "type": "quantitative"}})


def view(*layers: Spec, title: str = "", height: int = HEIGHT, **more: Any) -> Spec:
    """Returns a view of layers; its title distinguishes it from others of the figure."""
    heading = {"title": {"text": title, "anchor": "start", "fontSize": 13}} if title else {}
    return {**heading, "height": height, "layer": [*layers], **more}


def log_axis(values: Sequence[float], title: str) -> tuple[Spec, float, list[Spec]]:
    """Returns the y encoding of positive values on a broken logarithmic axis.

    Returns:
        The encoding without its field; the place of zero, below all other ticks; and layers with
        the sign of the break, without any if no value is zero.
    """
    above = [value for value in values if value > 0]
    low, high = min(above), max(above)
    digits = next(digits for least, digits in _DIGITS.items() if high / low >= least)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    pad = max(1.15, (high / low) ** 0.12)
    ends, shown, zero, sign = [low / pad, high * pad], [], 0.0, list[Spec]()
    if len(above) < len(values):
        broken, zero = low / pad, low / pad**2.6
        ends[0] = zero / pad**0.6
        shown, middle = [zero], math.sqrt(broken * zero)
        place = {"x": {"value": 0}, "y": {"datum": middle}}
        sign = [
            layer({"type": "square", "size": 120, "opacity": 1, "color": light("surface"),
                   "tooltip": None}, [{}], **place),
            layer({"type": "text", "text": "\N{ALMOST EQUAL TO}", "fontSize": 16, "angle": 90,
                   "color": light("muted"), "tooltip": None}, [{}], **place),
        ]  # fmt: skip
    shown += [tick for tick in ticks if (low / pad if zero else ends[0]) <= tick <= ends[1]]
    text = f"datum.value < {1.001 * zero!r} ? '0' : format(datum.value, '~g')"
    encoding = {
        "type": "quantitative", "title": title, "scale": {"type": "log", "domain": ends},
        "axis": {"values": shown, "labelExpr": text, "labelOverlap": False},
    }  # fmt: skip
    return encoding, zero, sign


def short(value: float) -> float | None:
    """Returns a number to five digits, which bounds the page; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def shortened(names: Sequence[str]) -> list[str]:
    """Returns a label for every name, no two of them equal: rows of one label are drawn as one.

    Of long names that begin alike, beginning and end are kept.
    """
    labels: list[str] = []
    heads = Counter(name[: _NAMED - 1] for name in names)
    for name in names:
        label = name
        if len(name) > _NAMED:
            end = _NAMED // 2 if heads[name[: _NAMED - 1]] > 1 else 0
            label = name[: _NAMED - 1 - end] + "\N{HORIZONTAL ELLIPSIS}" + name[len(name) - end :]
        while label in labels:
            label += "\N{PRIME}"
        labels.append(label)
    return labels


def views_of(figure: Spec | Sequence[Spec]) -> list[Spec]:
    """Returns the whole specifications of a figure's views, in the colours of the page."""
    axis = {
        "gridColor": light("grid"), "domainColor": light("rule"), "tickColor": light("rule"),
        "labelColor": light("muted"), "titleColor": light("muted"), "titleFontWeight": "normal",
        "labelFontSize": 11, "titleFontSize": 12, "labelOverlap": True,
    }  # fmt: skip
    text = {"labelColor": light("ink"), "labelFontSize": FONT_SIZE}
    config = {
        "axis": axis, "axisQuantitative": {"tickCount": {"expr": "narrow ? 4 : 8"}},
        "legend": text | {"symbolOpacity": 1, "columnPadding": 24}, "header": text,
        "title": {"color": light("ink")}, "view": {"stroke": None},
        "text": {"color": light("ink"), "fontSize": FONT_SIZE},
    }  # fmt: skip
    whole = {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "config": config}
    views = [figure] if isinstance(figure, dict) else figure
    return [whole | {"background": light("surface")} | one for one in views]


def whole(figure: Spec | Sequence[Spec]) -> Spec:
    """Returns a figure as one specification of the width of files."""
    views = [_as_wide(one) for one in views_of(figure)]
    common = {key: views[0].pop(key) for key in ("$schema", "config", "background")}
    views = [{k: v for k, v in one.items() if k not in common} for one in views]
    narrow = {"name": "narrow", "value": False}
    if len(views) == 1:
        return common | views[0] | {"params": [narrow, *views[0].get("params", [])]}
    return common | {"params": [narrow], "vconcat": views}


def _as_wide(one: Spec) -> Spec:
    if "facet" in one:
        inner = {"width": WIDTH // 3 - 60} | one["spec"]
        return {"columns": 3} | one | {"spec": inner}
    return {"width": WIDTH} | one if "layer" in one or "mark" in one else one


def files_of(name: str, figure: Spec | Sequence[Spec]) -> Iterable[tuple[str, str | bytes]]:
    """Yields the files of a figure: its specification and, with vl-convert, SVG and PNG."""
    spec = whole(figure)
    yield f"{name}.vl.json", json.dumps(spec, allow_nan=False) + "\n"
    if (converter := converting()) is not None:
        yield f"{name}.svg", converter.vegalite_to_svg(spec)
        yield f"{name}.png", converter.vegalite_to_png(spec, scale=2)


def converting() -> Any:
    """Returns the module that draws specifications and has the page's library; None without it."""
    try:
        import vl_convert
    except ImportError:
        return None
    return vl_convert


def with_variables(specs: Any) -> Any:
    """Returns specifications whose colours are CSS variables, which follow the reader's theme."""
    text = json.dumps(specs, allow_nan=False)
    for role, (colour, _) in COLOURS.items():
        text = text.replace(f'"{colour}"', f'"var(--{role})"')
    return json.loads(text)
