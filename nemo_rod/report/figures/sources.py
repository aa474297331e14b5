"""Which sources forget, which are protected and which are replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rod.report.arms import parse_arm
from nemo_rod.report.chord import linear_fit, pearson
from nemo_rod.report.figures.canvas import BOTTOM, LEFT, TOP, Canvas
from nemo_rod.report.figures.labels import (
    Label,
    label_right,
    label_width,
    place_labels,
    shorten,
    spread,
)
from nemo_rod.report.style import arm_colour, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]


def forgetting_profile(results: Results, canvas: Canvas) -> Figure | None:
    """Forgetting left per source and arm against forgetting without replay, with linear fits."""
    arms = results["arms"]
    vulnerability = arms.get("no_replay", {}).get("forgetting_by_source")
    names = [name for name in arms if parse_arm(name).kind in ("fixed", "rod")]
    names = [name for name in names if arms[name]["forgetting_by_source"]]
    if not vulnerability or not names:
        return None
    height = 5.6 if canvas.narrow else 4.9
    figure = canvas.figure(height)
    slopes = {name: results["profile"][name]["slope"] for name in names}
    texts = [
        parse_arm(name).label + (f"\nslope {slope:.2f}" if slope is not None else "")
        for name, slope in slopes.items()
    ]
    right = label_width(texts, canvas)
    above = 0.25 + 0.71 * label_width([shorten(name, canvas) for name in vulnerability], canvas)
    box = (LEFT, BOTTOM, canvas.width - LEFT - right, height - BOTTOM - TOP - above)
    axes = canvas.axes(
        figure, box, "forgetting without replay (nats per token)",
        "forgetting left (nats per token)", y_title_offset=9 + 72 * above,
    )  # fmt: skip
    left = [value for name in names for value in arms[name]["forgetting_by_source"].values()]
    _frame_profile(axes, list(vulnerability.values()), left, canvas)
    parsed = [parse_arm(name) for name in arms]
    colours = [arm_colour(parse_arm(name), parsed) for name in names]
    ends = [
        _draw_arm(
            axes,
            vulnerability,
            arms[name]["forgetting_by_source"],
            colour,
            is_rod=parse_arm(name).kind == "rod",
        )
        for name, colour in zip(names, colours, strict=True)
    ]
    label_right(axes, texts, ends, colours, canvas, lines=2)
    _label_top(axes, vulnerability, canvas)
    return figure


def _frame_profile(
    axes: Axes, vulnerability: Sequence[float], left: Sequence[float], canvas: Canvas
) -> None:
    """Limits, the line of no forgetting and the diagonal of no replay."""
    x_low, x_high = min(0.0, *vulnerability), max(0.01, *vulnerability)
    y_low, y_high = min(0.0, *left), max(0.01, *left)
    axes.set_xlim(x_low, x_high + 0.05 * (x_high - x_low))
    axes.set_ylim(y_low - 0.04 * (y_high - y_low), y_high + 0.08 * (y_high - y_low))
    axes.axhline(0, color=light("rule"), linewidth=1, zorder=1)
    end = min(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot(
        [0, end], [0, end], color=light("no-replay"), linewidth=1.2, linestyle=(0, (1, 2)),
        zorder=1.5,
    )  # fmt: skip
    axes.annotate(
        "no replay", (0.86 * end, 0.86 * end), (-6, 3), textcoords="offset points", ha="right",
        va="center", color=light("no-replay"), fontsize=canvas.font_size,
    )  # fmt: skip


def _draw_arm(
    axes: Axes,
    vulnerability: Mapping[str, float],
    by_source: Mapping[str, float],
    colour: str,
    *,
    is_rod: bool,
) -> float:
    """An arm's sources and their fit; returns the height at the right edge, for its label."""
    axes.plot(
        [vulnerability[source] for source in by_source], list(by_source.values()),
        "*" if is_rod else "o", color=colour, markersize=10 if is_rod else 5.5,
        markeredgewidth=0, zorder=5 if is_rod else 4,
    )  # fmt: skip
    fit = linear_fit(vulnerability, by_source)
    if fit is None:
        return max(by_source.values())
    edges = np.array(axes.get_xlim())
    axes.plot(
        edges, fit[1] + fit[0] * edges, color=colour, linewidth=2.0 if is_rod else 1.3, alpha=0.9,
        zorder=3,
    )  # fmt: skip
    return float(fit[1] + fit[0] * edges[1])


def _label_top(axes: Axes, position: Mapping[str, float], canvas: Canvas) -> None:
    """Names of sources above the axes, slanted, each led to its place."""
    names = sorted(position, key=lambda name: position[name])
    low, high = axes.get_xlim()
    inches = axes.get_window_extent().width / axes.figure.dpi
    gap = (high - low) * (canvas.font_size * 1.45 / 72) / inches
    places = spread([position[name] for name in names], gap, low, high)
    y_low, y_high = axes.get_ylim()
    for name, place in zip(names, places, strict=True):
        axes.plot(
            [position[name]] * 2, [y_low, y_high], color=light("grid"), linewidth=0.8, zorder=0.5
        )
        axes.annotate(
            "", (position[name], 1), (place, 1.045), xycoords=("data", "axes fraction"),
            arrowprops={"arrowstyle": "-", "color": light("rule"), "linewidth": 0.8},
            annotation_clip=False,
        )  # fmt: skip
        axes.annotate(
            shorten(name, canvas), (place, 1.055), xycoords=("data", "axes fraction"), rotation=45,
            rotation_mode="anchor", ha="left", va="center", color=light("ink"),
            fontsize=canvas.font_size, annotation_clip=False,
        )  # fmt: skip


def sampling_ratio(results: Results, canvas: Canvas) -> Figure | None:
    """RoD's sampling ratio per source against two measures of how much the source needs replay."""
    arms = results["arms"]
    ratio = {
        name: value
        for name, value in (arms.get("rod", {}).get("sampling_ratio_by_source") or {}).items()
        if value is not None
    }
    panels = []
    for arm in ("no_replay", results["reference_arm"]):
        by_source = arms.get(arm, {}).get("forgetting_by_source") if arm else None
        if ratio and by_source:
            panels.append((parse_arm(arm).label, by_source))
    if not panels:
        return None
    figure, boxes = canvas.panels(len(panels), 3.4 if canvas.narrow else 3.9)
    for (label, by_source), box in zip(panels, boxes, strict=True):
        title = f"forgetting under {label} (nats per token)"
        axes = canvas.axes(figure, box, title, "sampling ratio under RoD")
        _draw_ratio(axes, by_source, ratio, canvas)
    return figure


def _draw_ratio(
    axes: Axes, by_source: Mapping[str, float], ratio: Mapping[str, float], canvas: Canvas
) -> None:
    names = [name for name in ratio if name in by_source]
    x = np.array([by_source[name] for name in names])
    y = np.array([ratio[name] for name in names])
    pad_x, pad_y = 0.16 * max(np.ptp(x), 1e-3), 0.16 * max(np.ptp(y), 0.1)
    axes.set_xlim(x.min() - pad_x, x.max() + pad_x)
    axes.set_ylim(min(y.min(), 1.0) - pad_y, max(y.max(), 1.0) + pad_y)
    axes.axhline(1, color=light("rule"), linewidth=1, zorder=1)
    line: list[tuple[float, float]] = []
    fit = linear_fit(by_source, ratio)
    if fit:
        ends = np.array([x.min() - pad_x / 2, x.max() + pad_x / 2])
        fitted = fit[1] + fit[0] * ends
        axes.plot(ends, fitted, color=light("rod"), linewidth=1.3, linestyle=(0, (4, 2)), zorder=2)
        line = [
            (float(px), float(fit[1] + fit[0] * px)) for px in np.linspace(ends[0], ends[1], 60)
        ]
    axes.plot(x, y, "o", color=light("rod"), markersize=7, markeredgewidth=0, zorder=5)
    labels = [
        Label(float(px), float(py), shorten(name, canvas), light("ink"))
        for name, px, py in zip(names, x, y, strict=True)
    ]
    one = [(float(px), 1.0) for px in np.linspace(*axes.get_xlim(), 60)]
    place_labels(axes, labels, avoid=line + one, size=canvas.font_size)
    r = pearson(by_source, ratio)
    text = "r not defined" if r is None else f"r = {r:.2f}".replace("-", "\N{MINUS SIGN}")
    axes.annotate(
        text, (0, 1), (6, -4),
        xycoords="axes fraction", textcoords="offset points", ha="left", va="top",
        color=light("rod"), fontweight="bold",
    )  # fmt: skip
