"""Empty figures in the house style, and their export: SVG for the page, SVG and PNG files.

All figures have one width, with their axes in one column, so that the same text is legible at the
width of the page and of a phone.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nemo_rod.lab.report.style import light, with_variables

WIDTH = 4.8  # inches; a phone shows it in about 360 pixels
FONT_SIZE = 9.0  # points, of labels inside the axes
LEFT, RIGHT, TOP, BOTTOM = 0.62, 0.12, 0.42, 0.58  # inches of margin around axes
HEADING = 0.22  # inches of further margin for a heading

Box = tuple[float, float, float, float]  # left, bottom, width, height in inches

_RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelpad": 6,
    "grid.linewidth": 0.7,
    **{f"{axis}tick.{ticks}.size": 0 for axis in "xy" for ticks in ("major", "minor")},
    **{f"{axis}tick.major.pad": 5 for axis in "xy"},
    "svg.hashsalt": "rod",
}


def new_figure(height: float) -> Figure:
    """Returns a new figure of `height` inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=100)
    FigureCanvasAgg(figure)
    figure.set_facecolor(light("surface"))
    return figure


def panels(
    count: int, height: float, *, top: float = TOP, right: float = RIGHT
) -> tuple[Figure, list[Box]]:
    """Returns a figure and the boxes of `count` axes, from the top down.

    `height` is that of one of them with its margins; `top` and `right` are margins, in inches.
    """
    size = (WIDTH - LEFT - right, height - BOTTOM - top)
    boxes = [(LEFT, i * height + BOTTOM, *size) for i in reversed(range(count))]
    return new_figure(count * height), boxes


def add_axes(
    figure: Figure,
    box: Box,
    x_title: str,
    y_title: str,
    *,
    heading: str = "",
    y_title_offset: float = 9,
) -> Axes:
    """Adds axes with titles; that of the y axis is `y_title_offset` points above them.

    Label placement measures text in pixels, so the box is fixed before drawing. The heading
    distinguishes these axes from others in the figure.
    """
    width, height = figure.get_size_inches()
    with rc_context(_RC):
        axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        axes.set_xlabel(x_title, color=light("muted"))
    for text, offset, colour, weight in (
        (y_title, y_title_offset, "muted", "normal"),
        (heading, y_title_offset + 15, "ink", "bold"),
    ):
        axes.annotate(
            text, (0, 1), (-34, offset), xycoords="axes fraction", textcoords="offset points",
            color=light(colour), ha="left", va="bottom", fontsize=_RC["font.size"],
            fontweight=weight, annotation_clip=False,
        )  # fmt: skip
    axes.set_facecolor("none")
    axes.grid(color=light("grid"))
    axes.tick_params(which="both", colors=light("muted"), labelcolor=light("muted"))
    for spine in axes.spines.values():
        spine.set_color(light("rule"))
    return axes


def files_of(figure: Any) -> dict[str, str | bytes]:
    """Returns a figure by suffix: .svg, with text as outlines to look the same everywhere; .png."""
    if isinstance(figure, dict):
        import vl_convert

        png = vl_convert.vegalite_to_png(figure, scale=2)
        return {".svg": vl_convert.vegalite_to_svg(figure), ".png": png}
    svg, out = BytesIO(), BytesIO()
    with rc_context(_RC | {"svg.fonttype": "path"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(out, format="png", dpi=200, metadata={"Software": None})
    return {".svg": svg.getvalue(), ".png": out.getvalue()}


def inline_svg(figure: Any, prefix: str) -> str:
    """Returns the figure as an `<svg>` element for an HTML page with several of them.

    Colours become CSS variables, text stays text in the page's font, and ids get a unique prefix.
    """
    if isinstance(figure, dict):  # of Vega-Lite
        import vl_convert

        svg = str(vl_convert.vegalite_to_svg(figure))
    else:
        stream = BytesIO()
        with rc_context(_RC | {"svg.fonttype": "none"}):
            figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        svg = stream.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The SVG's style sheet would apply to the whole page.
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    svg = re.sub(r' width="[^"]*pt" height="[^"]*pt"', "", svg, count=1)
    svg = re.sub(r"\n\s*", "\n", svg)
    return with_variables(svg).strip()
