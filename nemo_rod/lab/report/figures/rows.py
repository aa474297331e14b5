"""Arms in rows: the change of every capability, and the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_rod.lab.report.arm_names import frontier_arms, parse_arm
from nemo_rod.lab.report.figures.canvas import BOTTOM, LEFT, RIGHT, TOP, Canvas
from nemo_rod.lab.report.figures.labels import label_width, shorten
from nemo_rod.lab.report.paper import paper
from nemo_rod.lab.report.style import arm_colour, light

Results = Mapping[str, Any]
_ROW = 0.24  # inches
_GAP = 0.7  # rows between two capabilities


def capabilities(results: Results, canvas: Canvas) -> Figure | None:
    """Draws the change of accuracy by capability and arm, in points."""
    arms = results["arms"]
    names = [n for n in arms if parse_arm(n).kind in ("no_replay", "fixed", "max_replay", "rod")]
    names = [name for name in names if arms[name]["capability_change"]]
    if not names:
        return None
    groups = list(arms[names[0]]["capability_change"])
    labels = [parse_arm(name).label for name in names]
    left = label_width(labels, canvas)
    rows = len(groups) * (len(names) + 1 + _GAP)
    height = BOTTOM + TOP + rows * _ROW
    figure = canvas.figure(height)
    box = (left, BOTTOM, canvas.width - left - RIGHT - 0.2, height - BOTTOM - TOP)
    axes = canvas.axes(figure, box, "change of accuracy against the base model (points)", "")
    parsed = [parse_arm(name) for name in arms]
    said = paper()["fig:qwen_task_forgetting"].get(results["recipe"], {})
    row, places = 0.0, []
    for group in groups:
        axes.annotate(
            group, (0, row), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="left", va="center", color=light("ink"),
            fontweight="bold", fontsize=canvas.font_size, zorder=6,
        )  # fmt: skip
        for name in names:
            row += 1
            places.append(row)
            change = 100 * arms[name]["capability_change"][group]
            colour = arm_colour(parse_arm(name), parsed)
            axes.barh(row, change, height=0.72, color=colour, zorder=3)
            if (theirs := said.get(name, {}).get(group)) is not None:
                axes.plot(100 * theirs, row, "x", color=light("ink"), markersize=6, zorder=5)
        row += 1 + _GAP
    _name_rows(axes, places, labels * len(groups), rows - _GAP, canvas)
    axes.axvline(0, color=light("rule"), linewidth=1, zorder=4)
    return figure


def seeds(results: Results, canvas: Canvas) -> Figure | None:
    """Draws mean and range over seeds of each arm's adaptation loss and F_val, and RoD's share."""
    runs = [results, *results["replicates"]]
    names = frontier_arms(results["arms"])
    names += [n for n in results["arms"] if n != "base" and n not in names]
    if len(runs) < 2 or not names:
        return None
    labels = [shorten(parse_arm(name).label, canvas, more=9) for name in names]
    left, rows = label_width(labels, canvas), _ROW * len(names)
    shares = [run["arms"].get("rod", {}).get("share_by_decile") for run in runs]
    shares = [share for share in shares if share]
    below = _SHARE if len(shares) > 1 else 0.0
    each = BOTTOM + TOP + rows
    figure = canvas.figure(each * (2 if canvas.narrow else 1) + below)
    width = canvas.width - left - RIGHT
    if not canvas.narrow:
        width = (width - 2 * RIGHT) / 2
    parsed = [parse_arm(name) for name in results["arms"]]
    for i, (measure, title) in enumerate(_OVER_SEEDS.items()):
        x = left if canvas.narrow else left + i * (width + 2 * RIGHT)
        y = below + BOTTOM + (each if canvas.narrow and i == 0 else 0.0)
        axes = canvas.axes(figure, (x, y, width, rows), title, "")
        for row, name in enumerate(names):
            values = [run["arms"].get(name, {}).get(measure) for run in runs]
            known = [value for value in values if value is not None]
            if known:
                _draw_range(axes, row, known, arm_colour(parse_arm(name), parsed))
        has_names = canvas.narrow or i == 0
        _name_rows(axes, range(len(names)), labels if has_names else [], len(names), canvas)
    if below:
        box = (LEFT, BOTTOM, canvas.width - LEFT - RIGHT, below - BOTTOM - TOP)
        axes = canvas.axes(figure, box, "tenth of the run", "replay share of RoD (%)")
        _draw_band(axes, 100 * np.array(shares))
    return figure


_SHARE = 2.9  # inches
_OVER_SEEDS = {"adapt_loss": "adaptation loss (nats)", "val_forgetting": "forgetting F_val (nats)"}


def _draw_band(axes: Axes, share_RD: npt.NDArray[np.float64]) -> None:
    """Draws mean and range over runs (R) of a value by tenths of the run (D)."""
    tenth_D = np.arange(1, share_RD.shape[1] + 1)
    colour = light("rod")
    axes.fill_between(
        tenth_D, share_RD.min(axis=0), share_RD.max(axis=0), color=colour, alpha=0.25, linewidth=0
    )
    axes.plot(tenth_D, share_RD.mean(axis=0), "o-", color=colour, markersize=4)
    axes.set_ylim(bottom=0)


def _draw_range(axes: Axes, row: float, values: Sequence[float], colour: str) -> None:
    axes.plot(
        [min(values), max(values)], [row, row], color=colour, linewidth=2, alpha=0.6, zorder=2
    )
    axes.plot(values, [row] * len(values), "o", color=colour, markersize=3.5, alpha=0.6, zorder=3)
    axes.plot(
        float(np.mean(values)), row, "|", color=colour, markersize=11, markeredgewidth=2, zorder=4
    )


def _name_rows(
    axes: Axes, places: Sequence[float], labels: Sequence[str], rows: float, canvas: Canvas
) -> None:
    axes.set_yticks(
        list(places), labels or [""] * len(places), fontsize=canvas.font_size, color=light("ink")
    )
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
