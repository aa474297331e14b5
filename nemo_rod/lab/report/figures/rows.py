"""Arms in rows: the change of each capability, and the range over seeds.

Shape suffixes: R = runs, D = tenths of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_rod.lab.report.designs import frontier_arms
from nemo_rod.lab.report.figures import canvas
from nemo_rod.lab.report.figures.canvas import BOTTOM, FONT_SIZE, TOP, add_axes, new_figure
from nemo_rod.lab.report.figures.labels import label_width, shorten
from nemo_rod.lab.report.paper import paper
from nemo_rod.lab.report.results import Results
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.selection.arm_names import filter_kinds, parse_arm

_ROW = 0.24  # inches
_GAP = 0.7  # rows between two capabilities


def capabilities(results: Results) -> Figure | None:
    """Draws the change of accuracy by capability and arm, in points."""
    arms = results["arms"]
    names = filter_kinds(arms, "no_replay", "fixed", "max_replay", "rod")
    names = [name for name in names if arms[name]["capability_change"]]
    if not names:
        return None
    groups = list(arms[names[0]]["capability_change"])
    labels = [parse_arm(name).label for name in names]
    left = label_width(labels)
    rows = len(groups) * (len(names) + 1 + _GAP)
    height = BOTTOM + TOP + rows * _ROW
    figure = new_figure(height)
    box = (left, BOTTOM, canvas.WIDTH - left - canvas.RIGHT - 0.2, height - BOTTOM - TOP)
    axes = add_axes(figure, box, "change of accuracy against the base model (points)", "")
    theirs = paper()["fig:qwen_task_forgetting"].get(results["recipe"], {})
    row, places = 0.0, []
    for group in groups:
        axes.annotate(
            group, (0, row), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="left", va="center", color=light("ink"),
            fontweight="bold", fontsize=FONT_SIZE, zorder=6,
        )  # fmt: skip
        for name in names:
            row += 1
            places.append(row)
            change = 100 * arms[name]["capability_change"][group]
            axes.barh(row, change, height=0.72, color=arm_colour(name, arms), zorder=3)
            if (value := theirs.get(name, {}).get(group)) is not None:
                axes.plot(100 * value, row, "x", color=light("ink"), markersize=6, zorder=5)
        row += 1 + _GAP
    _name_rows(axes, places, labels * len(groups), rows - _GAP)
    axes.axvline(0, color=light("rule"), linewidth=1, zorder=4)
    return figure


def seeds(results: Results) -> Figure | None:
    """Draws mean and range over seeds of each arm's adaptation loss and F_val, and RoD's share."""
    runs = [results, *results["replicates"]]
    names = frontier_arms(results["arms"])
    names += [n for n in results["arms"] if n != "base" and n not in names]
    if len(runs) < 2 or not names:
        return None
    labels = [shorten(parse_arm(name).label, more=9) for name in names]
    left, rows = label_width(labels), _ROW * len(names)
    shares = [run["arms"].get("rod", {}).get("share_by_decile") for run in runs]
    shares = [share for share in shares if share]
    below = _SHARE if len(shares) > 1 else 0.0
    each = BOTTOM + TOP + rows
    figure = new_figure(2 * each + below)
    width = canvas.WIDTH - left - canvas.RIGHT
    for i, (measure, title) in enumerate(_OVER_SEEDS.items()):
        y = below + BOTTOM + each * (1 - i)
        axes = add_axes(figure, (left, y, width, rows), title, "")
        for row, name in enumerate(names):
            values = [run["arms"].get(name, {}).get(measure) for run in runs]
            known = [value for value in values if value is not None]
            if not known:
                continue
            colour = arm_colour(name, results["arms"])
            ends, all_of_row = [min(known), max(known)], [row] * len(known)
            axes.plot(ends, [row, row], color=colour, linewidth=2, alpha=0.6, zorder=2)
            axes.plot(known, all_of_row, "o", color=colour, markersize=3.5, alpha=0.6, zorder=3)
            axes.plot(
                float(np.mean(known)), row, "|", color=colour, markersize=11, markeredgewidth=2,
                zorder=4,
            )  # fmt: skip
        _name_rows(axes, range(len(names)), labels, len(names))
    if below:
        box = (canvas.LEFT, BOTTOM, canvas.WIDTH - canvas.LEFT - canvas.RIGHT, below - BOTTOM - TOP)
        axes = add_axes(figure, box, "tenth of the run", "replay share of RoD (%)")
        share_RD, tenth_D = 100 * np.array(shares), np.arange(1, len(shares[0]) + 1)
        low_D, high_D, colour = share_RD.min(axis=0), share_RD.max(axis=0), light("rod")
        axes.fill_between(tenth_D, low_D, high_D, color=colour, alpha=0.25, linewidth=0)
        axes.plot(tenth_D, share_RD.mean(axis=0), "o-", color=colour, markersize=4)
        axes.set_ylim(bottom=0)
    return figure


_SHARE = 2.9  # inches
_OVER_SEEDS = {"adapt_loss": "adaptation loss (nats)", "val_forgetting": "forgetting F_val (nats)"}


def _name_rows(axes: Axes, places: Sequence[float], labels: Sequence[str], rows: float) -> None:
    axes.set_yticks(list(places), labels, fontsize=FONT_SIZE, color=light("ink"))
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
