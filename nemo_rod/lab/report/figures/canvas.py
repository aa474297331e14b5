"""Empty figures in the house style, and their export: SVG for the page, SVG and PNG files.

Figures have two widths, for desktops and for phones, with text of the same size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nemo_rod.lab.report.style import light, with_variables

LEFT, RIGHT, TOP, BOTTOM = 0.62, 0.12, 0.42, 0.58  # inches of margin around axes

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
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 5,
    "ytick.major.pad": 5,
    "svg.hashsalt": "rod",
}


@dataclass(frozen=True)
class Canvas:
    """The width and type size of a figure; a `narrow` one is for phones."""

    narrow: bool = False

    @property
    def width(self) -> float:
        """Width in inches."""
        return 4.3 if self.narrow else 8.4

    @property
    def font_size(self) -> float:
        """Size of labels inside the axes, in points."""
        return 8.5 if self.narrow else 9.0

    def figure(self, height: float) -> Figure:
        """Returns a new figure of this width and of `height` inches."""
        figure = Figure(figsize=(self.width, height), dpi=100)
        FigureCanvasAgg(figure)
        figure.set_facecolor(light("surface"))
        return figure

    def panels(
        self,
        count: int,
        height: float,
        *,
        columns: int = 2,
        top: float = TOP,
        right: float = RIGHT,
    ) -> tuple[Figure, list[Box]]:
        """Returns a figure and the boxes of `count` axes, row by row; on a phone, in one column.

        The height is that of a row, and `top` and `right` are margins of each box, in inches.
        """
        columns = 1 if self.narrow else min(columns, count)
        rows = -(-count // columns)
        width = self.width / columns
        boxes = [
            (
                (i % columns) * width + LEFT,
                (rows - 1 - i // columns) * height + BOTTOM,
                width - LEFT - right,
                height - BOTTOM - top,
            )
            for i in range(count)
        ]
        return self.figure(rows * height), boxes

    def axes(
        self,
        figure: Figure,
        box: Box,
        x_title: str,
        y_title: str,
        *,
        heading: str = "",
        y_title_offset: float = 9,
    ) -> Axes:
        """Adds axes with titles; that of the y axis lies above them, some points away.

        Label placement measures text in pixels, so the box is fixed here rather than laid out at
        drawing time. The heading distinguishes these axes from others in the figure.
        """
        width, height = figure.get_size_inches()
        with rc_context(_RC):
            axes = figure.add_axes(
                (box[0] / width, box[1] / height, box[2] / width, box[3] / height)
            )
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


def save(figure: Figure, stem: Path) -> None:
    """Writes `<stem>.svg`, with text as outlines for equal rendering, and `<stem>.png`."""
    with rc_context(_RC | {"svg.fonttype": "path"}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})


def inline_svg(figure: Figure, prefix: str) -> str:
    """Returns the figure as an `<svg>` element for an HTML page with several of them.

    Colours become CSS variables, text stays text in the page's font, and ids get a unique prefix.
    """
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
