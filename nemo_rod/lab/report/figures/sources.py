"""Forgetting, protection and replay by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rod.lab.report.chord import linear_fit
from nemo_rod.lab.report.designs import filter_kinds
from nemo_rod.lab.report.figures.drawing import (
    STAR,
    Rows,
    Spec,
    as_is,
    by_name,
    layer,
    line_at,
    number,
    shortened,
    view,
)
from nemo_rod.lab.report.figures.labels import label_layers
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.paper import category_of, category_role, paper_value, title_of
from nemo_rod.lab.report.results import Results, RunResults, drop_none
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.selection.arm_names import parse_arm

_MOST_NAMED = 16  # sources; the pointer names the others
_POINT = {"type": "point", "filled": True, "opacity": 1}


def forgetting_profile(shown: Sequence[RunResults]) -> Picture | None:
    """Draws residual forgetting per source and arm against forgetting without replay, with fits.

    Dashed lines are the fits without the most influential source.
    """
    views = []
    for _, results in shown:
        names = filter_kinds(results["arms"], "fixed", "rod")
        names = [name for name in names if results["arms"][name]["forgetting_by_source"]]
        vulnerability = results["arms"].get("no_replay", {}).get("forgetting_by_source") or {}
        if names and vulnerability:
            title = title_of(results["recipe"]) if len(shown) > 1 else ""
            views.append(_profile(results, vulnerability, names, title))
    if not views:
        return None
    without = shown[0][1]["profile"].get("rod", {}).get("without") or "the most influential source"
    text = (
        "One point per replay source and arm. The dotted diagonal is no replay at all; with a flat "
        "line, the most vulnerable sources are protected most. Numbers are the slopes of the "
        f"fitted lines; dashed lines are the fits without {without}, whose no-replay forgetting "
        "lies farthest from the mean."
    )
    return Picture(views, "Protection by source", text, 210)


def _profile(
    results: Results, vulnerability: Mapping[str, float], names: Sequence[str], title: str
) -> Spec:
    arms, profiles = results["arms"], results["profile"]
    theirs = paper_value("fig:forgetting_profiles_extended", "slope", results["recipe"]) or {}
    left = [value for name in names for value in arms[name]["forgetting_by_source"].values()]
    low, high = min(0.0, *vulnerability.values()), max(0.01, *vulnerability.values())
    least, most = min(0.0, *left), max(0.01, *left)
    ends = [low, high + 0.05 * (high - low)]
    heights = [least - 0.06 * (most - least), most + 0.12 * (most - least)]
    x = number("x", "forgetting without replay (nats per token)", scale={"domain": ends})
    y = number("y", "forgetting left (nats per token)", scale={"domain": heights})
    colours, points, fits = dict[str, str](), list[dict[str, Any]](), list[dict[str, Any]]()
    for name in names:
        profile, by_source, is_rod = (
            profiles[name],
            arms[name]["forgetting_by_source"],
            name == "rod",
        )
        numbers = {"slope": profile["slope"], "paper": theirs.get(name)}
        numbers["without"] = profile["slope_without"]
        words = [f"{word} {value:z.2f}" for word, value in drop_none(numbers).items()]
        label = ": ".join(filter(None, (parse_arm(name).label, ", ".join(words))))
        colours[label] = arm_colour(name, arms)
        points += [
            {"x": vulnerability[source], "y": value, "arm": label, "source": source,
             "shape": STAR if is_rod else "circle", "size": 240 if is_rod else 60, "text": "",
             "bold": False}
            for source, value in by_source.items()
        ]  # fmt: skip
        for suffix in ("", "_without"):
            slope, intercept = profile[f"slope{suffix}"], profile[f"intercept{suffix}"]
            for end in ends if slope is not None else ():
                fits.append({"x": end, "y": intercept + slope * end, "arm": label,
                             "dash": [4, 3] if suffix else [1, 0], "fit": f"{label}{suffix}",
                             "wide": (3.0 if is_rod else 1.4) - 0.6 * bool(suffix)})  # fmt: skip
    labels = dict(zip(vulnerability, shortened([*vulnerability]), strict=True))
    # a source is named at its highest point, the most vulnerable ones first
    for source in sorted(vulnerability, key=lambda n: -vulnerability[n])[:_MOST_NAMED]:
        mine = [point for point in points if point["source"] == source]
        max(mine, key=lambda point: point["y"])["text"] = labels[source]
    color = by_name("arm", colours, columns=1)
    diagonal = [{"x": end, "y": end} for end in (max(low, 0.0), ends[1])]
    look = {"strokeDash": as_is("dash"), "strokeWidth": as_is("wide")}
    tips = [{"field": "source"}, {"field": "arm"}, {"field": "x"}, {"field": "y"}]
    tips = [tip | ({"format": ".3f"} if len(tip["field"]) == 1 else {}) for tip in tips]
    return view(
        line_at(0),
        layer({"type": "line", "clip": True, "strokeDash": [1, 3], "color": light("no-replay")},
              diagonal, x=x, y=y),
        layer({"type": "line", "clip": True, "opacity": 0.85}, fits, x=x, y=y, color=color,
              detail={"field": "fit"}, **look),
        layer(_POINT, points, x=x, y=y, color=color, shape=as_is("shape"), size=as_is("size"),
              tooltip=tips),
        *label_layers(points, x, y, most=True),
        title=title, height=420,
    )  # fmt: skip


def sampling_ratio(shown: Sequence[RunResults]) -> Picture | None:
    """Draws RoD's sampling ratio per source against two measures of the need for replay.

    These are, per setting, forgetting without replay and residual forgetting under fixed replay.
    Sources of the paper have the colour of their category.
    """
    views = []
    for _, results in shown:
        arms = results["arms"]
        ratio = drop_none(arms.get("rod", {}).get("sampling_ratio_by_source"))
        for arm, key in (("no_replay", ""), (results["reference_arm"], "_residual")):
            by_source = arms.get(arm, {}).get("forgetting_by_source") if arm else None
            if ratio and by_source:
                title = title_of(results["recipe"]) if len(shown) > 1 else ""
                views.append(_ratios(results, parse_arm(arm).label, key, by_source, ratio, title))
    text = (
        "Each source's share of the replay trained on over its share of the replay candidates. RoD "
        "follows the forgetting that is left under replay; a source that is forgotten badly but "
        "recovers from a few blocks needs little replay, which weakens the relation with no-replay "
        "forgetting."
    )
    return Picture(views, "Replay by source", text, 220) if views else None


def _ratios(
    results: Results,
    label: str,
    key: str,
    by_source: Mapping[str, float],
    ratio: Mapping[str, float],
    title: str,
) -> Spec:
    names = [name for name in ratio if name in by_source]
    x_values, y_values = [by_source[n] for n in names], [ratio[n] for n in names]
    pad_x = 0.16 * max(max(x_values) - min(x_values), 1e-3)
    pad_y = 0.16 * max(max(y_values) - min(y_values), 0.1)
    ends = [min(x_values) - pad_x, max(x_values) + pad_x]
    heights = [min(*y_values, 1.0) - pad_y, max(*y_values, 1.0) + 2 * pad_y]
    x = number("x", f"forgetting under {label} (nats per token)", scale={"domain": ends})
    y = number("y", "sampling ratio under RoD (times)", scale={"domain": heights})
    # the sources that need most and least are named
    by_need = sorted(names, key=lambda name: by_source[name])
    spoken = {*by_need[: _MOST_NAMED // 2], *by_need[-_MOST_NAMED // 2 :]}
    points: Rows = []
    labels = dict(zip(names, shortened(names), strict=True))
    for name in names:
        category = category_of(name)
        points.append(
            {"x": by_source[name], "y": ratio[name], "source": name,
             "category": category or "replay source", "bold": False,
             "text": labels[name] if name in spoken else ""}
        )  # fmt: skip
    categories = sorted({point["category"] for point in points})
    colours = {
        name: light("rod" if name == "replay source" else category_role(name))
        for name in categories
    }
    line: Rows = []
    if fit := linear_fit(by_source, ratio):
        inner = (ends[0] + pad_x / 2, ends[1] - pad_x / 2)
        line = [{"x": end, "y": fit[1] + fit[0] * end} for end in inner]
    profile = results["profile"]["rod"]
    r, without = profile[f"pearson_r{key}"], profile[f"pearson_r{key}_without"]
    theirs = paper_value("fig:oversampling_extended", "pearson_r", results["recipe"])
    text = "r not defined" if r is None else f"r = {r:z.2f} over {len(names)} sources"
    if r is not None:
        text += f" (paper {theirs:.2f})" if theirs is not None and not key else ""
        text += "" if without is None else f", {without:z.2f} without {profile['without']}"
    path = [(row["x"], row["y"]) for row in line]
    across = [(ends[0], 1.0), (ends[1], 1.0)]
    tips = [{"field": "source"}, {"field": "x", "format": ".3f"}, {"field": "y", "format": ".2f"}]
    color = by_name("category", colours) if categories != ["replay source"] else {
        "value": light("rod")}  # fmt: skip
    return view(
        line_at(1),
        layer({"type": "line", "strokeDash": [4, 2], "strokeWidth": 2, "color": light("rod")}, line,
              x=x, y=y),
        layer(_POINT | {"size": 90}, points, x=x, y=y, color=color, tooltip=tips),
        *label_layers(points, x, y, [path, across] if path else [across], most=True),
        title=": ".join(filter(None, (title, text.replace("-", "\N{MINUS SIGN}")))),
    )  # fmt: skip
