"""Adaptation loss against forgetting: every arm, and the chord of fixed replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from nemo_rod.lab.report.arm_names import frontier_arms, parse_arm
from nemo_rod.lab.report.figures.canvas import Canvas
from nemo_rod.lab.report.figures.plane import TITLES, Plane, Point, draw_planes, points_of
from nemo_rod.lab.report.paper import title_of

Results = Mapping[str, Any]


def frontier(results: Results, canvas: Canvas) -> Figure | None:
    """Draws adaptation loss against F_val for every arm, with the chord of fixed replay.

    If merges or other arms stretch the figure, a second panel shows the region of the chord; if
    there are task results, another one shows their forgetting.
    """
    arms = results["arms"]
    names = frontier_arms(arms)
    points = points_of(arms, names, "val_forgetting")
    if not points:
        return None
    near = {name: point for name, point in points.items() if _is_near(results, name)}
    zooms = len(near) >= 2 and _span(points) > 1.6 * _span(near)
    merges = sorted(
        (name for name in points if parse_arm(name).kind == "merge"),
        key=lambda name: parse_arm(name).value,
    )
    heading = "all arms" if zooms else ""
    # arms named in the second panel have no label here, except two that connect the panels
    texts = {n: "" for n in near if n not in ("no_replay", "rod")} if zooms else {}
    others = results["replicates"]
    planes = [
        Plane(
            results, list(points), heading=heading, texts=texts, paths=[merges],
            replicates=[] if zooms else others, show_gap=not zooms,
        )
    ]  # fmt: skip
    if zooms:
        heading = "around the fixed-replay chord"
        planes.append(Plane(results, list(near), heading=heading, replicates=others, show_gap=True))
    planes.append(Plane(results, list(near), "task_forgetting", "tasks", replicates=others))
    return draw_planes(planes, canvas)


def settings_frontier(settings: Sequence[Results], canvas: Canvas) -> Figure | None:
    """Draws the frontier of several settings: F_val, and the forgetting of tasks if known."""
    planes = []
    for results in settings:
        arms = results["arms"]
        names = frontier_arms(arms)
        near = [name for name in names if _is_near(results, name)] or names
        title = title_of(results["recipe"])
        planes += [Plane(results, near, measure, title) for measure in TITLES]
    return draw_planes(planes, canvas)


def _is_near(results: Results, name: str) -> bool:
    return name in results["chord"] or parse_arm(name).kind in ("rod", "rod_variant", "max_replay")


def _span(points: Mapping[str, Point]) -> float:
    losses = [loss for loss, _ in points.values()]
    return max(losses) - min(losses)
