"""Arms on the plane of adaptation loss and forgetting, with the chord of fixed replay.

The arms of an ablation's figure are selected by their designs (`arm.json`), not by their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from nemo_rod.lab.report.designs import continued, frontier_arms, helped, varying, with_fixed_share
from nemo_rod.lab.report.figures.canvas import FONT_SIZE, HEADING, TOP, add_axes, panels
from nemo_rod.lab.report.figures.during_training import binned, exposures
from nemo_rod.lab.report.figures.labels import Label, label_right, label_width, place_labels
from nemo_rod.lab.report.paper import paper_arms, title_of
from nemo_rod.lab.report.results import Results, Shown, chord_of
from nemo_rod.lab.report.run_files import Run
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.lab.report.table import signed
from nemo_rod.selection.arm_names import ArmName, filter_kinds, parse_arm
from nemo_rod.selection.arms import Arm

Point = tuple[float, float]  # adaptation loss, forgetting
Measure = Literal["val_forgetting", "task_forgetting"]
_TITLES: dict[Measure, str] = {
    "val_forgetting": "forgetting F_val (nats per token, log scale)",
    "task_forgetting": "forgetting of tasks (accuracy)",
}
_X_TITLE = "adaptation loss (nats per token)"
_TIMES = "\N{MULTIPLICATION SIGN}"
_CIRCLE = ("o", 7.5)
# kind of arm -> marker and its size, other than a circle
_MARKERS = {
    "rod": ("*", 17.0), "rod_variant": ("*", 11.0), "merge": ("D", 6.0), "max_replay": ("s", 7.5),
    "control": ("v", 7.5), "ablation": ("^", 7.5), "other": ("^", 7.5),
}  # fmt: skip
_TINTS = ("fixed-0", "rod", "fixed-2", "fixed-4", "merge", "other")  # for m = 1.5, 2, 4, 8, ...


@dataclass(frozen=True)
class Plane:
    """The arms of a run to draw, and how."""

    results: Results
    names: Sequence[str]
    measure: Measure = "val_forgetting"  # on the vertical axis
    heading: str = ""  # distinguishes these axes from others
    # labels of arms other than their own name; "" for none
    texts: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[Sequence[str]] = ()  # arms to join by a line, in order
    replicates: Sequence[Results] = ()  # other seeds, drawn faintly and without labels
    show_gap: bool = False  # whether to show RoD's distance from the chord


def frontier(results: Results) -> Figure | None:
    """Draws adaptation loss against F_val for every arm, with the chord of fixed replay.

    If arms lie far from the chord, such as merges, a second panel shows the region of the chord; if
    there are task results, another one shows their forgetting.
    """
    return draw_planes(_frontier(results))


def settings_frontier(shown: Sequence[Shown]) -> Figure | None:
    """Draws the frontiers of several settings."""
    return draw_planes(
        [plane for _, one in shown for plane in _frontier(one, title_of(one["recipe"]))]
    )


def _frontier(results: Results, title: str = "") -> list[Plane]:
    arms = results["arms"]
    names = frontier_arms(arms)
    points = points_of(arms, names, "val_forgetting")
    near = {name: point for name, point in points.items() if _is_near(results, name)}
    zooms = len(near) >= 2 and _span(points) > 1.6 * _span(near)
    merges = sorted(filter_kinds(points, "merge"), key=lambda name: parse_arm(name).value)
    # arms labelled in the second panel have no label here, except two that connect the panels
    texts = {n: "" for n in near if n not in ("no_replay", "rod")} if zooms else {}
    others = results.get("replicates", [])

    def heading(text: str) -> str:
        return ": ".join(filter(None, (title, text)))

    planes = [
        Plane(
            results, list(points), heading=heading("all arms" if zooms else ""), texts=texts,
            paths=[merges], replicates=[] if zooms else others, show_gap=not zooms,
        )
    ]  # fmt: skip
    if zooms:
        zoomed = heading("around the fixed-replay chord")
        planes.append(Plane(results, list(near), heading=zoomed, replicates=others, show_gap=True))
    return [
        *planes,
        Plane(results, list(near), "task_forgetting", heading("tasks"), replicates=others),
    ]


def _is_near(results: Results, name: str) -> bool:
    return name in results["chord"] or parse_arm(name).kind in ("rod", "rod_variant", "max_replay")


def _span(points: Mapping[str, Point]) -> float:
    losses = [loss for loss, _ in points.values()]
    return max(losses) - min(losses)


def components(results: Results) -> Figure | None:
    """Draws ablations, controls and RoD's joint selection."""
    names = with_fixed_share(results["arms"])
    if "rod" not in results["arms"] or not names:
        return None
    return draw_planes([Plane(results, [*names, "rod"])])


def budgets(results: Results) -> Figure | None:
    """Draws fixed replay and RoD at the common budget and at others."""
    arms = results["arms"]
    paths = continued(arms)
    if not paths:
        return None
    texts = {}
    for path in paths:
        of = next(name for name in path if arms[name]["design"]["of"] in (None, name))
        for name in path:
            budget = arms[name]["design"]["budget"]
            texts[name] = parse_arm(of).label if name == of else f"{budget:.2f}{_TIMES}"
    names = [name for path in paths for name in path]
    others = filter_kinds(arms, "fixed", "max_replay", "rod")
    names += [name for name in others if name not in names]
    return draw_planes([Plane(results, names, paths=paths, texts=texts)])


def transfer(results: Results) -> Figure | None:
    """Draws arms with another model's curriculum or reference losses, beside RoD's own."""
    arms = results["arms"]
    names = helped(arms)
    if not names:
        return None
    names = [*filter_kinds(arms, "fixed", "rod"), *names]
    return draw_planes([Plane(results, names, replicates=results["replicates"])])


def swept(run: Run, results: Results, key: str) -> Figure | None:
    """Draws a plane of the arms that differ in one key, and the replay share over their steps.

    Ticks on a share mark where its candidates have passed once, twice etc. over the adaptation
    blocks.
    """
    arms, sign = results["arms"], Arm.__dataclass_fields__[key].metadata["label"]
    names = varying(arms, key)
    if len(names) < 2 or not points_of(arms, names, "val_forgetting"):
        return None
    texts = {name: f"{sign} = {arms[name]['design'][key]:g}" for name in names}
    histories = {name: run.arms[name].history for name in names}
    shown = {name: history for name, history in histories.items() if history is not None}
    right = label_width(list(texts.values()))
    figure, boxes = panels(1 + bool(shown), 3.6, right=right)
    axes = add_axes(figure, boxes[0], _X_TITLE, _TITLES["val_forgetting"])
    draw_plane(axes, Plane(results, names, texts=texts, paths=[names]))
    if shown:
        axes = add_axes(figure, boxes[1], "training step", "replay share (%)")
        ends, colours = [], []
        num_adaptation = sum(run.block_counts["adaptation"].values())
        for name, history in shown.items():
            colours.append(light(_TINTS[names.index(name) % len(_TINTS)]))
            step_B, share_B = binned(history, 100 * history.share_T)
            axes.plot(step_B, share_B, color=colours[-1], linewidth=1.4)
            drawn = exposures(history, history.candidates_TO, num_adaptation)
            at = [step for _, step in drawn]
            axes.plot(
                at, np.interp(at, step_B, share_B), "|", color=colours[-1], markersize=11,
                markeredgewidth=1.6,
            )  # fmt: skip
            ends.append(float(share_B[-1]))
        axes.set_ylim(bottom=0)
        label_right(axes, [texts[name] for name in shown], ends, colours)
    return figure


def points_of(arms: Mapping[str, Any], names: Sequence[str], measure: Measure) -> dict[str, Point]:
    """Returns the points of arms that are measured.

    F_val has a logarithmic axis: an arm that forgot nothing stands at half of the least F_val
    above 0, and the base is left out.
    """
    points = {}
    above = [arm[measure] for arm in arms.values() if (arm.get(measure) or 0) > 0]
    for name in names:
        loss, forgetting = (arms.get(name, {}).get(key) for key in ("adapt_loss", measure))
        if loss is None or forgetting is None:
            continue
        if measure == "task_forgetting" or forgetting > 0:
            points[name] = (loss, forgetting)
        elif above and name != "base":
            points[name] = (loss, min(above) / 2)
    return points


def draw_planes(planes: Sequence[Plane]) -> Figure | None:
    """Returns a figure of the planes that have points, from the top down; None without any."""
    planes = [p for p in planes if points_of(p.results["arms"], p.names, p.measure)]
    if not planes:
        return None
    top = TOP + HEADING * any(plane.heading for plane in planes)
    figure, boxes = panels(len(planes), 3.8, top=top)
    for plane, box in zip(planes, boxes, strict=True):
        axes = add_axes(figure, box, _X_TITLE, _TITLES[plane.measure], heading=plane.heading)
        draw_plane(axes, plane)
    return figure


def draw_plane(axes: Axes, plane: Plane) -> None:
    """Draws the arms of a plane over the chord, and the paper's own numbers as crosses."""
    results = plane.results
    points = points_of(results["arms"], plane.names, plane.measure)
    paper = points_of(paper_arms(results["recipe"]), list(points), plane.measure)
    _set_limits(axes, [*points.values(), *paper.values()], plane.measure)
    is_log = plane.measure == "val_forgetting"
    for replicate in plane.replicates:
        if is_log:
            _draw_chord(axes, replicate, alpha=0.25)
        for name, point in points_of(replicate["arms"], plane.names, plane.measure).items():
            marker, size = _MARKERS.get(parse_arm(name).kind, _CIRCLE)
            axes.plot(
                *point, marker, color=arm_colour(name, replicate["arms"]), alpha=0.35,
                markersize=size * 0.6, markeredgewidth=0, zorder=3,
            )  # fmt: skip
    lines = _draw_chord(axes, results) if is_log else []
    names = list(results["arms"])
    for path in plane.paths:
        ends = [points[name] for name in path if name in points]
        if len(ends) > 1:
            colour = arm_colour(_as_drawn(results, path[-1])[0].name, names)
            axes.plot(*zip(*ends, strict=True), color=colour, linewidth=1, alpha=0.5, zorder=2)
            lines += _along(ends, is_log)
    labels = []
    for name, point in points.items():
        arm, is_open = _as_drawn(results, name)
        marker, size = _MARKERS.get(arm.kind, _CIRCLE)
        axes.plot(
            *point, marker, color=arm_colour(arm.name, names), markersize=size,
            markerfacecolor=light("surface") if is_open else None,
            markeredgewidth=1.2 if is_open else 0, zorder=5,
        )  # fmt: skip
        ends = results["intervals"].get(name, {}) if is_log else {}
        if {"adapt_loss", "val_forgetting"} <= set(ends):
            thin: Any = {"color": arm_colour(arm.name, names), "linewidth": 0.7, "alpha": 0.6}
            axes.hlines(point[1], *ends["adapt_loss"], **thin)
            axes.vlines(point[0], *np.maximum(ends["val_forgetting"], 1e-9), **thin)
            lines += _along([(end, point[1]) for end in ends["adapt_loss"]])
        is_rod = arm.kind == "rod"
        text = plane.texts.get(name, parse_arm(name).label)
        labels.append(Label(*point, text, light("rod" if is_rod else "ink"), is_rod))
    for name, point in paper.items():
        lines.append(point)
        axes.plot(
            *point, "x", color=arm_colour(name, names), markersize=6, markeredgewidth=1.3, zorder=4
        )
    labels.sort(key=lambda label: not label.bold)
    comparison = results["comparisons"].get("rod", {})
    gap = comparison.get("gap")
    if plane.show_gap and gap is not None:  # from RoD to the chord at equal forgetting
        colour, (loss, forgetting) = light("rod"), points["rod"]
        ends = [(loss, forgetting), (loss - gap, forgetting)]
        axes.plot(
            *zip(*ends, strict=True), color=colour, linewidth=1.2, linestyle=(0, (2, 1.5)), zorder=4
        )
        axes.plot(loss - gap, forgetting, "|", color=colour, markersize=7, zorder=4)
        end = min(loss - gap, axes.get_xlim()[1])  # an extended chord may end outside the axes
        how = "extrapolated" if comparison["extrapolated"] else "at equal F_val"
        labels.append(Label(end, forgetting, f"{signed(3)(gap)} {how}", colour))
        lines += _along(ends)
    place_labels(axes, labels, avoid=lines, size=FONT_SIZE)


def _as_drawn(results: Results, name: str) -> tuple[ArmName, bool]:
    """Returns the arm that determines mark and colour, and whether the mark is open."""
    arm = parse_arm(name)
    of = (results["arms"][name].get("design") or {}).get("of")
    if arm.kind == "other" and of not in (None, name):
        return parse_arm(of), True
    return arm, arm.kind in ("rod_variant", "ablation", "control")


def _set_limits(axes: Axes, points: Sequence[Point], measure: Measure) -> None:
    """Sets limits with a margin for labels of the outermost points; a log axis for F_val."""
    loss = np.array([point[0] for point in points])
    pad_x = 0.12 * max(float(np.ptp(loss)), 0.02)
    axes.set_xlim(loss.min() - pad_x, loss.max() + 2 * pad_x)  # labels are on the right
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    if measure == "task_forgetting":
        high = max(*(point[1] for point in points), 0.01)
        axes.set_ylim(-0.06 * high, 1.12 * high)
        return
    axes.set_yscale("log")
    log_f = np.log([point[1] for point in points])
    pad_y = 0.12 * max(float(np.ptp(log_f)), 0.4)
    axes.set_ylim(np.exp(log_f.min() - pad_y), np.exp(log_f.max() + pad_y))
    is_wide = float(np.ptp(log_f)) > np.log(4)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_wide else range(1, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_chord(axes: Axes, results: Results, alpha: float = 1.0) -> list[Point]:
    """Draws the chord and returns points along it, for labels to avoid."""
    chord = chord_of(results["arms"], results["chord"])
    if chord is None:
        return []
    path = [(point.adapt_loss, point.forgetting) for point in chord.points]
    # Straight on a logarithmic axis, exactly the interpolation used by the checks.
    colour = light("fixed-2")
    axes.plot(*zip(*path, strict=True), color=colour, linewidth=1.4, alpha=alpha, zorder=2)
    return _along(path)


def _along(path: Sequence[Point], is_log: bool = True) -> list[Point]:
    """Returns points on the straight lines of a path."""
    points = []
    for (x0, f0), (x1, f1) in itertools.pairwise(path):
        for t in np.linspace(0, 1, 300):
            height = f0 ** (1 - t) * f1**t if is_log else f0 + t * (f1 - f0)
            points.append((float(x0 + t * (x1 - x0)), float(height)))
    return points
