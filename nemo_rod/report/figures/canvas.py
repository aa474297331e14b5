"""Empty figures in the house style, and their export: SVG for the page, SVG and PNG files.

Figures come in two widths, one for desktops and one drawn anew for phones, so that text keeps its
size on both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rod.report.style import light, with_variables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, RIGHT, TOP, BOTTOM = 0.62, 0.12, 0.42, 0.58  # inches left free around axes

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
    """A figure's width and type size.

    Attributes:
        narrow: Whether it is for a phone.
    """

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
        """A new figure of this width and of `height` inches."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

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
        """A figure and the boxes of `count` axes, row by row; on a phone one above the other.

        Args:
            count: Number of axes.
            height: Inches of each row.
            columns: Axes in a row, at most.
            top: Inches left free above each.
            right: Inches left free to the right of each.
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
        """Axes with titles.

        Label placement measures text in pixels, so the box is fixed here rather than laid out at
        the time of drawing.

        Args:
            figure: To add them to.
            box: Left, bottom, width and height in inches.
            x_title: With unit.
            y_title: With unit; stands above the axis, where it reads without a turned head.
            heading: What tells these axes from others in the figure.
            y_title_offset: Points between the axes and `y_title`.
        """
        from matplotlib import rc_context

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
    """Writes `<stem>.svg` (text as outlines, the same everywhere) and `<stem>.png`."""
    from matplotlib import rc_context

    with rc_context(_RC | {"svg.fonttype": "path"}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})


def inline_svg(figure: Figure, prefix: str, description: str) -> str:
    """The figure as an `<svg>` element for an HTML page that it shares with others.

    Colours become CSS variables, text stays text in the page's font, ids get a prefix of their own.
    """
    from matplotlib import rc_context

    stream = BytesIO()
    with rc_context(_RC | {"svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Its style sheet would reach every element of the page.
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    label = f' role="img" aria-label="{escape(description, quote=True)}"'
    svg = re.sub(r' width="[^"]*pt" height="[^"]*pt"', label, svg, count=1)
    svg = re.sub(r"\n\s*", "\n", svg)
    return with_variables(svg).strip()
