"""Forgetting, protection and replay by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_rod.lab.report.chord import linear_fit
from nemo_rod.lab.report.figures.canvas import (
    FONT_SIZE,
    HEADING,
    LEFT,
    TOP,
    WIDTH,
    add_axes,
    panels,
)
from nemo_rod.lab.report.figures.labels import (
    Label,
    label_right,
    label_width,
    place_labels,
    shorten,
    spread,
)
from nemo_rod.lab.report.paper import category_of, category_role, paper, paper_value, title_of
from nemo_rod.lab.report.results import Results, Shown, known
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.selection.arm_names import filter_kinds, parse_arm

_LINE = 0.18  # inches of a line of the legend


def forgetting_profile(settings: Sequence[Shown]) -> Figure | None:
    """Draws residual forgetting per source and arm against forgetting without replay, with fits.

    One panel per setting. Broken lines are the fits without the most influential source.
    """
    shown = []
    for _, results in settings:
        arms = results["arms"]
        names = filter_kinds(arms, "fixed", "rod")
        names = [name for name in names if arms[name]["forgetting_by_source"]]
        vulnerability = arms.get("no_replay", {}).get("forgetting_by_source") or {}
        if names and vulnerability:
            label, of = "fig:forgetting_profiles_extended", results["recipe"]
            theirs, texts = paper_value(label, "slope", of) or {}, []
            for name in names:  # with its slope, the paper's, and the one without the outlier
                profile, lines = results["profile"][name], [parse_arm(name).label]
                values = {"slope": profile["slope"], "paper": theirs.get(name)}
                values["broken"] = profile["slope_without"]
                if profile["slope"] is not None:
                    known_values = known(values).items()
                    lines += [f"{word} {value:z.2f}" for word, value in known_values]
                texts.append("\n".join(lines).replace("-", "\N{MINUS SIGN}"))
            shown.append((results, vulnerability, names, texts))
    if not shown:
        return None
    sources = [shorten(name) for _, vulnerability, *_ in shown for name in vulnerability]
    above = 0.25 + 0.71 * label_width(sources)
    right = label_width([text for *_, texts in shown for text in texts])
    heading = HEADING * (len(settings) > 1)
    top = TOP + above + heading
    figure, boxes = panels(len(shown), 5.6 + heading, top=top, right=right)
    for (results, vulnerability, names, texts), box in zip(shown, boxes, strict=True):
        axes = add_axes(
            figure, box, "forgetting without replay (nats per token)",
            "forgetting left (nats per token)", y_title_offset=9 + 72 * above,
            heading=title_of(results["recipe"]) if heading else "",
        )  # fmt: skip
        ends, colours = _draw_profiles(axes, results, vulnerability, names)
        most = max(text.count("\n") for text in texts) + 1
        label_right(axes, texts, ends, colours, lines=most)
        # slanted names of sources above the axes, with lines to their positions
        position = sorted(vulnerability.items(), key=lambda item: item[1])
        low, high = axes.get_xlim()
        inches = axes.get_window_extent().width / axes.figure.dpi
        gap = (high - low) * (FONT_SIZE * 1.45 / 72) / inches
        places = spread([at for _, at in position], gap, low, high)
        for (name, at), place in zip(position, places, strict=True):
            axes.plot([at] * 2, axes.get_ylim(), color=light("grid"), linewidth=0.8, zorder=0.5)
            axes.annotate(
                "", (at, 1), (place, 1.045), xycoords=("data", "axes fraction"),
                arrowprops={"arrowstyle": "-", "color": light("rule"), "linewidth": 0.8},
                annotation_clip=False,
            )  # fmt: skip
            axes.annotate(
                shorten(name), (place, 1.055), xycoords=("data", "axes fraction"), rotation=45,
                rotation_mode="anchor", ha="left", va="center", color=light("ink"),
                fontsize=FONT_SIZE, annotation_clip=False,
            )  # fmt: skip
    return figure


def _draw_profiles(
    axes: Axes, results: Results, vulnerability: Mapping[str, float], names: Sequence[str]
) -> tuple[list[float], list[str]]:
    """Draws the arms' sources and fits, the line of no forgetting and the diagonal of no replay.

    Returns:
        Each arm's height at the right edge, for its label, and its colour.
    """
    arms = results["arms"]
    left = [value for name in names for value in arms[name]["forgetting_by_source"].values()]
    x_low, x_high = min(0.0, *vulnerability.values()), max(0.01, *vulnerability.values())
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
        va="center", color=light("no-replay"), fontsize=FONT_SIZE,
    )  # fmt: skip
    edges = np.array(axes.get_xlim())
    heights, colours = [], []
    for name in names:
        profile, by_source = results["profile"][name], arms[name]["forgetting_by_source"]
        is_rod, colour = name == "rod", arm_colour(name, arms)
        axes.plot(
            [vulnerability[source] for source in by_source], list(by_source.values()),
            "*" if is_rod else "o", color=colour, markersize=10 if is_rod else 5.5,
            markeredgewidth=0, zorder=5 if is_rod else 4,
        )  # fmt: skip
        ends = []
        for suffix, style in (("", "-"), ("_without", (0, (4, 3)))):
            slope, intercept = profile[f"slope{suffix}"], profile[f"intercept{suffix}"]
            if slope is None:
                continue
            thick = (2.0 if is_rod else 1.3) - (0.5 if suffix else 0)
            axes.plot(
                edges, intercept + slope * edges, color=colour, linewidth=thick, linestyle=style,
                alpha=0.6 if suffix else 0.9, zorder=3,
            )  # fmt: skip
            ends.append(float(intercept + slope * edges[1]))
        heights.append(ends[0] if ends else max(by_source.values()))
        colours.append(colour)
    return heights, colours


def sampling_ratio(settings: Sequence[Shown]) -> Figure | None:
    """Draws RoD's sampling ratio per source against two measures of the need for replay.

    These are, per setting, forgetting without replay and residual forgetting under fixed replay.
    Sources of the paper have the colour of their category.
    """
    rows = []
    for _, results in settings:
        arms = results["arms"]
        ratio = known(arms.get("rod", {}).get("sampling_ratio_by_source"))
        for arm, key in (("no_replay", ""), (results["reference_arm"], "_residual")):
            by_source = arms.get(arm, {}).get("forgetting_by_source") if arm else None
            if ratio and by_source:
                rows.append((results, parse_arm(arm).label, key, by_source, ratio))
    if not rows:
        return None
    heading = HEADING * (len(settings) > 1)
    used = {category_of(name) for *_, ratio in rows for name in ratio}
    categories = [name for name in paper()["categories"] if name in used]
    legend = _LINE * -(-len(categories) // 2)
    figure, boxes = panels(len(rows), 3.6 + heading + legend, top=TOP + heading + legend)
    for i, name in enumerate(categories):  # in two columns above the first axes
        below = (0.05 + _LINE * (i // 2)) / figure.get_figheight()
        figure.text(
            (LEFT / 2 / WIDTH) + (i % 2) / 2, 1 - below,
            f"\N{BLACK CIRCLE} {name}", color=light(category_role(name)), fontsize=FONT_SIZE,
            va="top",
        )  # fmt: skip
    for (results, label, key, by_source, ratio), box in zip(rows, boxes, strict=True):
        axes = add_axes(
            figure, box, f"forgetting under {label} (nats per token)", "sampling ratio under RoD",
            heading=title_of(results["recipe"]) if heading else "",
        )  # fmt: skip
        names = [name for name in ratio if name in by_source]
        x = np.array([by_source[name] for name in names])
        y = np.array([ratio[name] for name in names])
        pad_x, pad_y = 0.16 * max(np.ptp(x), 1e-3), 0.16 * max(np.ptp(y), 0.1)
        axes.set_xlim(x.min() - pad_x, x.max() + pad_x)
        axes.set_ylim(min(y.min(), 1.0) - pad_y, max(y.max(), 1.0) + 2 * pad_y)
        axes.axhline(1, color=light("rule"), linewidth=1, zorder=1)
        avoid = []
        if fit := linear_fit(by_source, ratio):
            ends = np.array([x.min() - pad_x / 2, x.max() + pad_x / 2])
            axes.plot(
                ends, fit[1] + fit[0] * ends, color=light("rod"), linewidth=1.3,
                linestyle=(0, (4, 2)), zorder=2,
            )  # fmt: skip
            avoid = [
                (px, fit[1] + fit[0] * px) for px in np.linspace(ends[0], ends[1], 60).tolist()
            ]
        for name, px, py in zip(names, x, y, strict=True):
            category = category_of(name)
            colour = light("rod" if category is None else category_role(category))
            axes.plot(px, py, "o", color=colour, markersize=7, markeredgewidth=0, zorder=5)
        labels = [
            Label(px, py, shorten(name), light("ink"))
            for name, px, py in zip(names, x.tolist(), y.tolist(), strict=True)
        ]
        avoid += [(px, 1.0) for px in np.linspace(*axes.get_xlim(), 60).tolist()]
        place_labels(axes, labels, avoid=avoid, size=FONT_SIZE)
        profile = results["profile"]["rod"]
        r, without = profile[f"pearson_r{key}"], profile[f"pearson_r{key}_without"]
        theirs = paper_value("fig:oversampling_extended", "pearson_r", results["recipe"])
        text = "r not defined" if r is None else f"r = {r:z.2f}"
        if r is not None:
            text += f" (paper {theirs:.2f})" if theirs is not None and not key else ""
            text += "" if without is None else f"\n{without:z.2f} without {profile['without']}"
        axes.annotate(
            text.replace("-", "\N{MINUS SIGN}"), (0, 1), (6, -4), xycoords="axes fraction",
            textcoords="offset points", ha="left", va="top", color=light("rod"), fontweight="bold",
        )  # fmt: skip
    return figure
