"""The effect of RoD's components, pool, weights, budget, and of a smaller model's help.

The arms of a figure are determined by their differences (`arm.json`), not by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from nemo_rod.lab.report.arm_names import parse_arm
from nemo_rod.lab.report.designs import continued, helped, varying, with_fixed_share
from nemo_rod.lab.report.figures.canvas import add_axes, panels
from nemo_rod.lab.report.figures.labels import label_right, label_width
from nemo_rod.lab.report.figures.plane import (
    TITLES,
    X_TITLE,
    Plane,
    draw_plane,
    draw_planes,
    points_of,
)
from nemo_rod.lab.report.style import light

Results = Mapping[str, Any]
TIMES = "\N{MULTIPLICATION SIGN}"
_SIGNS = {"multiplier": "m", "kappa": "\u03ba"}
_TINTS = ("fixed-0", "rod", "fixed-2", "fixed-4", "merge", "other")  # for m = 1.5, 2, 4, 8, ...


def components(results: Results) -> Figure | None:
    """Draws allocations that choose at random or by score, controls, and joint selection."""
    names = with_fixed_share(results["arms"])
    if "rod" not in results["arms"] or not names:
        return None
    return draw_planes([Plane(results, [*names, "rod"])])


def pool_size(results: Results) -> Figure | None:
    """Draws arms by candidate multiplier m, and the replay share that emerges."""
    return _swept(results, "multiplier")


def weighting(results: Results) -> Figure | None:
    """Draws arms by weight kappa of the replay scores, and the share that emerges."""
    return _swept(results, "kappa")


def budgets(results: Results) -> Figure | None:
    """Draws fixed replay and RoD at the common budget and at other ones."""
    arms = results["arms"]
    paths = continued(arms)
    if not paths:
        return None
    texts = {}
    for path in paths:
        of = next(name for name in path if arms[name]["design"]["of"] in (None, name))
        for name in path:
            budget = arms[name]["design"]["budget"]
            texts[name] = parse_arm(of).label if name == of else f"{budget:.2f}{TIMES}"
    names = [name for path in paths for name in path]
    names += [n for n in arms if parse_arm(n).kind in ("fixed", "rod") and n not in names]
    return draw_planes([Plane(results, names, paths=paths, texts=texts)])


def transfer(results: Results) -> Figure | None:
    """Draws arms with another model's curriculum or reference losses, beside RoD's own."""
    arms = results["arms"]
    names = helped(arms)
    if not names:
        return None
    beside = [name for name in arms if parse_arm(name).kind in ("fixed", "rod")]
    plane = Plane(results, [*beside, *names], replicates=results["replicates"])
    return draw_planes([plane])


def _swept(results: Results, key: str) -> Figure | None:
    """Draws a plane of the arms that differ in `key`, and their replay share by tenths."""
    arms = results["arms"]
    names = varying(arms, key)
    if len(names) < 2 or not points_of(arms, names, "val_forgetting"):
        return None
    texts = {name: f"{_SIGNS[key]} = {arms[name]['design'][key]:g}" for name in names}
    shown = [name for name in names if arms[name]["share_by_decile"]]
    right = label_width(list(texts.values()))
    figure, boxes = panels(1 + bool(shown), 3.6, right=right)
    axes = add_axes(figure, boxes[0], X_TITLE, TITLES["val_forgetting"])
    draw_plane(axes, Plane(results, names, texts=texts, paths=[names]))
    if shown:
        axes = add_axes(figure, boxes[1], "tenth of the run", "replay share (%)")
        ends = []
        colours = [light(_TINTS[names.index(name) % len(_TINTS)]) for name in shown]
        for name, colour in zip(shown, colours, strict=True):
            share = [100 * value for value in arms[name]["share_by_decile"]]
            axes.plot(range(1, len(share) + 1), share, "o-", color=colour, markersize=3.5)
            ends.append(share[-1])
        axes.set_ylim(bottom=0)
        label_right(axes, [texts[name] for name in shown], ends, colours)
    return figure
