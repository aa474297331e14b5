"""Adaptation loss against forgetting: every arm, and the chord that fixed replay spans."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rod.report.arms import ArmName, parse_arm
from nemo_rod.report.figures.canvas import TOP, Canvas
from nemo_rod.report.figures.labels import Label, place_labels
from nemo_rod.report.results import chord_of
from nemo_rod.report.style import arm_colour, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
Point = tuple[float, float]  # adaptation loss, F_val


def frontier(results: Results, canvas: Canvas, replicates: Sequence[Results] = ()) -> Figure | None:
    """Adaptation loss against F_val for every arm, with the chord of fixed replay.

    Where merges or other arms stretch the picture, a second panel shows the region of the chord.
    """
    points = _frontier_points(results)
    if not points:
        return None
    near = {name: point for name, point in points.items() if _is_near(results, name)}
    zooms = len(near) >= 2 and _span(points) > 1.6 * _span(near)
    panels = [points, near] if zooms else [points]
    headings = ["all arms", "around the fixed-replay chord"] if zooms else [""]
    figure, boxes = canvas.panels(
        len(panels), 3.6 if canvas.narrow else 4.3, top=TOP + 0.22 if zooms else TOP
    )
    for i, (shown, heading, box) in enumerate(zip(panels, headings, boxes, strict=True)):
        axes = canvas.axes(
            figure,
            box,
            "adaptation loss (nats per token)",
            "forgetting F_val (nats per token, log scale)",
            heading=heading,
        )
        _draw_panel(axes, results, shown, canvas, replicates, is_last=i == len(panels) - 1)
    return figure


def _frontier_points(results: Results) -> dict[str, Point]:
    """Arms with forgetting above zero, the only ones that a logarithm can show."""
    return {
        name: (arm["adapt_loss"], arm["val_forgetting"])
        for name, arm in results["arms"].items()
        if arm["adapt_loss"] is not None and (arm["val_forgetting"] or 0) > 0
    }


def _is_near(results: Results, name: str) -> bool:
    return name in results["chord"] or parse_arm(name).kind in ("rod", "rod_variant", "max_replay")


def _span(points: Mapping[str, Point]) -> float:
    losses = [loss for loss, _ in points.values()]
    return max(losses) - min(losses)


def _draw_panel(
    axes: Axes,
    results: Results,
    points: Mapping[str, Point],
    canvas: Canvas,
    replicates: Sequence[Results],
    *,
    is_last: bool,
) -> None:
    _set_limits(axes, list(points.values()))
    if is_last:
        for replicate in replicates:
            _draw_replicate(axes, replicate, set(points))
    lines = _draw_chord(axes, results)
    merges = sorted(
        (parse_arm(name).value, name) for name in points if parse_arm(name).kind == "merge"
    )
    path = [points[name] for _, name in merges]
    if len(path) > 1:
        axes.plot(*zip(*path, strict=True), color=light("merge"), linewidth=1, alpha=0.5, zorder=2)
        lines += _along(path)
    names = [parse_arm(name) for name in results["arms"]]
    labels = []
    for name, (loss, forgetting) in points.items():
        arm = parse_arm(name)
        is_variant = arm.kind == "rod_variant"
        axes.plot(
            loss, forgetting, _marker(arm), color=arm_colour(arm, names),
            markerfacecolor=light("surface") if is_variant else None,
            markersize=_marker_size(arm), markeredgewidth=1.2 if is_variant else 0, zorder=5,
        )  # fmt: skip
        is_rod = arm.kind == "rod"
        labels.append(Label(loss, forgetting, arm.label, light("rod" if is_rod else "ink"), is_rod))
    labels.sort(key=lambda label: not label.bold)
    if is_last:
        labels += _draw_gap(axes, results)
    place_labels(axes, labels, avoid=lines, size=canvas.font_size)


def _draw_replicate(axes: Axes, replicate: Results, shown: set[str]) -> None:
    """Chord and arms of a run with another seed, faintly and without labels."""
    _draw_chord(axes, replicate, alpha=0.25)
    names = [parse_arm(name) for name in replicate["arms"]]
    for name, (loss, forgetting) in _frontier_points(replicate).items():
        arm = parse_arm(name)
        if name in shown:
            axes.plot(
                loss, forgetting, _marker(arm), color=arm_colour(arm, names), alpha=0.35,
                markersize=_marker_size(arm) * 0.6, markeredgewidth=0, zorder=3,
            )  # fmt: skip


def _set_limits(axes: Axes, points: Sequence[Point]) -> None:
    """A logarithmic axis and limits with room for labels around the outermost points."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    loss = np.array([point[0] for point in points])
    log_f = np.log([point[1] for point in points])
    pad_x = 0.12 * max(float(np.ptp(loss)), 0.02)
    pad_y = 0.12 * max(float(np.ptp(log_f)), 0.4)
    axes.set_xlim(loss.min() - pad_x, loss.max() + 2 * pad_x)  # labels stand to the right
    axes.set_ylim(np.exp(log_f.min() - pad_y), np.exp(log_f.max() + pad_y))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _marker(arm: ArmName) -> str:
    return {"rod": "*", "rod_variant": "*", "merge": "D", "max_replay": "s", "other": "^"}.get(
        arm.kind, "o"
    )


def _marker_size(arm: ArmName) -> float:
    return {"rod": 17.0, "rod_variant": 11.0, "merge": 6.0}.get(arm.kind, 7.5)


def _draw_chord(axes: Axes, results: Results, alpha: float = 1.0) -> list[Point]:
    """Draws the chord and returns points along it, for labels to keep away from."""
    chord = chord_of(results["arms"], results["chord"])
    if chord is None:
        return []
    path = [(point.adapt_loss, point.forgetting) for point in chord.points]
    # Straight between the arms on a logarithmic axis: exactly the interpolation that is judged.
    colour = light("fixed-2")
    axes.plot(*zip(*path, strict=True), color=colour, linewidth=1.4, alpha=alpha, zorder=2)
    return _along(path)


def _along(path: Sequence[Point]) -> list[Point]:
    points = []
    for (x0, f0), (x1, f1) in itertools.pairwise(path):
        for t in np.linspace(0, 1, 40):
            points.append((float(x0 + t * (x1 - x0)), float(f0 ** (1 - t) * f1**t)))
    return points


def _draw_gap(axes: Axes, results: Results) -> list[Label]:
    """The distance from RoD to the chord at equal forgetting; returns its label."""
    chord = chord_of(results["arms"], results["chord"])
    gap = results["comparisons"].get("rod", {}).get("gap")
    if chord is None or gap is None:
        return []
    rod = results["arms"]["rod"]
    loss, forgetting = rod["adapt_loss"], rod["val_forgetting"]
    axes.plot(
        [loss, loss - gap], [forgetting] * 2, color=light("rod"), linewidth=1.2,
        linestyle=(0, (2, 1.5)), zorder=4,
    )  # fmt: skip
    axes.plot(loss - gap, forgetting, "|", color=light("rod"), markersize=7, zorder=4)
    text = f"{_signed(gap)} at equal F_val"
    return [Label(loss - gap, forgetting, text, light("rod"))]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")
