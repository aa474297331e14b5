"""Text beside marks without overlaps: around points, and along the right edge of axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from nemo_rod.lab.report.figures.canvas import FONT_SIZE
from nemo_rod.lab.report.style import light

_NUM_DIRECTIONS = 16
_DISTANCES = (7.0, 13.0, 22.0, 34.0)  # points from the mark
_MARK_RADIUS = 5.0  # points
_ON_A_MARK = 60.0
_ON_A_LINE = 30.0  # the most that covering lines costs
_ON_A_LEADER = 100.0
_LEADER_POINTS = 15

Points = npt.NDArray[np.float64]  # [n, 2] in pixels
Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels


@dataclass(frozen=True)
class Label:
    """A text for the mark at (x, y), in data coordinates.

    Earlier labels are placed first. Without a text it is only a mark for others to avoid.
    """

    x: float
    y: float
    text: str
    colour: str
    bold: bool = False


def place_labels(
    axes: Axes, labels: Sequence[Label], *, avoid: Sequence[tuple[float, float]] = (), size: float
) -> None:
    """Writes each label where it covers least.

    Of directions and distances around the point, the cheapest is chosen: covering another label or
    leaving the axes costs most, covering a mark or the thin leader between a mark and its label
    less, covering a line least. The limits of the axes must be final. `avoid` are points on lines,
    in data coordinates.
    """
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    to_pixels = axes.transData.transform
    scale = axes.figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    marks = to_pixels(np.array([(label.x, label.y) for label in labels]).reshape(-1, 2))
    lines = to_pixels(np.array(avoid, dtype=np.float64).reshape(-1, 2))
    placed: list[Box] = []
    leaders: list[Points] = []
    for label, (px, py) in zip(labels, marks, strict=True):
        if not label.text:
            continue
        text = axes.annotate(
            label.text, (label.x, label.y), (0, 0), textcoords="offset points", ha="center",
            va="center", color=label.colour, fontsize=size,
            fontweight="bold" if label.bold else "normal", annotation_clip=False, zorder=6,
        )  # fmt: skip
        extent = text.get_window_extent(renderer)
        half_w, half_h = extent.width / 2 + scale, extent.height / 2
        cheapest = math.inf
        for distance, k in itertools.product(_DISTANCES, range(_NUM_DIRECTIONS)):
            angle = 2 * math.pi * k / _NUM_DIRECTIONS
            # The distance is measured from the mark to the text's edge.
            dx = math.cos(angle) * (distance * scale + half_w)
            dy = math.sin(angle) * (distance * scale + half_h)
            box = (px + dx - half_w, py + dy - half_h, px + dx + half_w, py + dy + half_h)
            own = _leader((px, py), box, scale)
            cost = distance + 3 * (1 - math.cos(angle))
            for other in placed:
                width = min(box[2], other[2]) - max(box[0], other[0])
                height = min(box[3], other[3]) - max(box[1], other[1])
                if width > 0 and height > 0:
                    cost += 200 + width * height
                cost += _ON_A_LEADER * (_inside(own, other) > 0)
            cost += _ON_A_LEADER * sum(_inside(leader, box) > 0 for leader in leaders)
            cost += _ON_A_MARK * _inside(marks, box, _MARK_RADIUS * scale)
            # limited, so that the covered length of a line hardly matters
            cost += min(_ON_A_LINE, _inside(lines, box, scale))
            if cost >= cheapest:
                continue  # before the slow part
            if len(own):  # the leader may run along lines, or through other marks
                others = marks[(marks != own[0]).any(axis=1)]
                from_lines = np.abs(own[:, None] - lines[None]).max(axis=-1, initial=0)
                from_marks = np.abs(own[:, None] - others[None]).max(axis=-1, initial=0)
                cost += 4 * (from_lines < scale).any(axis=1).sum()
                cost += _ON_A_MARK * (from_marks < _MARK_RADIUS * scale).any(axis=0).sum()
            cost += 500 * (_inside(np.reshape(box, (2, 2)), frame.extents) < 2)
            if cost < cheapest:
                cheapest, offset, best, leader = cost, (dx / scale, dy / scale), box, own
        text.set_position(offset)
        placed.append(best)
        leaders.append(leader)
        x, y = axes.transData.inverted().transform(leader).T
        axes.plot(x, y, color=label.colour, linewidth=0.6, alpha=0.6, zorder=4)


def _inside(points: Points, box: Box, margin: float = 0.0) -> int:
    """Returns the number of points in a box."""
    inside = (points >= np.subtract(box[:2], margin)) & (points <= np.add(box[2:], margin))
    return int(inside.all(axis=1).sum())


def _leader(mark: tuple[float, ...], box: Box, scale: float) -> Points:
    """Returns points on the line from a mark to its label; none if the two are adjacent."""
    near_x = min(max(mark[0], box[0]), box[2])
    near_y = min(max(mark[1], box[1]), box[3])
    if math.hypot(near_x - mark[0], near_y - mark[1]) < 11 * scale:
        return np.empty((0, 2))
    return np.linspace(mark, (near_x, near_y), _LEADER_POINTS)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns positions at least `gap` apart inside [low, high], moved as little as possible.

    Their order stays the same. If they do not fit, they are spaced evenly over the whole range.
    """
    count = len(positions)
    order = np.argsort(positions, kind="stable")
    gap = min(gap, (high - low) / max(count - 1, 1))
    free = np.sort(positions) - gap * np.arange(count)  # must not fall: isotonic regression
    best = [max(min(free[i : k + 1].mean() for k in range(j, count)) for i in range(j + 1))
            for j in range(count)]  # fmt: skip
    placed = np.clip(best, low, high - gap * (count - 1)) + gap * np.arange(count)
    return [float(place) for place in placed[np.argsort(order)]]


def shorten(text: str, more: int = 0) -> str:
    """Returns a name cut to 16 characters, or `more` than that."""
    limit = 16 + more
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def label_width(texts: Sequence[str]) -> float:
    """Returns the margin for texts at the right edge, in inches."""
    longest = max(len(line) for text in texts for line in text.split("\n"))
    return 0.3 + longest * FONT_SIZE * 0.62 / 72


def label_right(
    axes: Axes, texts: Sequence[str], ends: Sequence[float], colours: Sequence[str], lines: int = 1
) -> None:
    """Writes texts right of the axes at the heights `ends`, moved apart to avoid overlaps."""
    low, high = axes.get_ylim()
    inches = axes.get_window_extent().height / axes.figure.dpi
    gap = (high - low) * (1.2 * lines + 0.25) * FONT_SIZE / 72 / inches
    places = spread(ends, gap, low + gap / 2, high - gap / 2)
    for text, end, place, colour in zip(texts, ends, places, colours, strict=True):
        inside = min(max(end, low), high)
        axes.annotate(
            "", (1, inside), (1.025, place), xycoords=("axes fraction", "data"),
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkA": 0,
                        "shrinkB": 0},
            annotation_clip=False,
        )  # fmt: skip
        axes.annotate(
            text, (1.025, place), (3, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="left", va="center", color=light("ink"),
            fontsize=FONT_SIZE, annotation_clip=False, linespacing=1.15,
        )  # fmt: skip
