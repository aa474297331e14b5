"""Arms in rows: the change of each capability, and the range over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rod.lab.report.designs import filter_kinds, frontier_arms
from nemo_rod.lab.report.figures.drawing import (
    CROSS,
    Rows,
    Spec,
    by_name,
    layer,
    line_at,
    number,
    shortened,
    view,
)
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.paper import paper, paper_arms
from nemo_rod.lab.report.results import RunResults
from nemo_rod.lab.report.style import arm_colour, light
from nemo_rod.selection.arm_names import parse_arm

_OVER_SEEDS = {
    "adapt_loss": "adaptation loss (nats per token)",
    "val_forgetting": "forgetting F_val (nats per token)",
}


def _labels(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, shortened([parse_arm(name).label for name in names]), strict=True))


def _arms(labels: Sequence[str]) -> Spec:
    """Returns the encoding of rows of arms, by their labels."""
    axis = {"labelLimit": 220, "labelColor": light("ink"), "labelFontSize": 12, "grid": False}
    return {"field": "arm", "type": "nominal", "title": None, "sort": labels, "axis": axis}


def capabilities(shown: Sequence[RunResults]) -> Picture | None:
    """Draws the change of accuracy by capability and arm, in points."""
    results = shown[0][1]
    arms, recipe = results["arms"], results["recipe"]
    names = filter_kinds(arms, "no_replay", "fixed", "max_replay", "rod")
    names = [name for name in names if arms[name]["capability_change"]]
    if not names:
        return None
    theirs = paper()["fig:qwen_task_forgetting"].get(recipe, {})
    rows: Rows = []
    labels = _labels(names)
    for name in names:
        for group, change in arms[name]["capability_change"].items():
            row = {"arm": labels[name], "capability": group}
            value = theirs.get(name, {}).get(group)
            rows.append(row | {"change": 100 * change, "paper": value and 100 * value})
    change = number("change", "change of accuracy against the base model (points)",
                    scale={"zero": True, "nice": True})  # fmt: skip
    colours = {labels[name]: arm_colour(name, arms) for name in names}
    y = _arms([*colours])
    cross = {"type": "point", "shape": CROSS, "color": light("ink"), "size": 50, "opacity": 1}
    bars = {
        "layer": [
            line_at(0, "x"),
            layer({"type": "bar", "height": 13}, x=change, y=y,
                  color=by_name("arm", colours) | {"legend": None}),
            layer(cross, x=change | {"field": "paper"}, y=y),
        ],
        "height": {"step": 18},
    }  # fmt: skip
    facet = {"field": "capability", "type": "nominal", "title": None}
    text = "Accuracy less the base model's, by capability; zero keeps all of it. "
    text += "Crosses are the paper's own numbers." if paper_arms(recipe) else ""
    return Picture({"data": {"values": rows}, "facet": facet, "spec": bars}, "Tasks", text, 230)


def seeds(shown: Sequence[RunResults]) -> Picture | None:
    """Draws mean and range over seeds of each arm's adaptation loss and F_val."""
    results = shown[0][1]
    runs = [results, *results["replicates"]]
    names = frontier_arms(results["arms"])
    names += [n for n in results["arms"] if n != "base" and n not in names]
    if len(runs) < 2 or not names:
        return None
    labels = _labels(names)
    colours = {labels[name]: arm_colour(name, results["arms"]) for name in names}
    color, y = by_name("arm", colours) | {"legend": None}, _arms([*colours])
    views = []
    for measure, title in _OVER_SEEDS.items():
        rows: Rows = [
            {"arm": labels[name], "value": value}
            for name in names
            for run in runs
            if (value := run["arms"].get(name, {}).get(measure)) is not None
        ]
        x = number("value", title)
        low, high = x | {"aggregate": "min"}, {"field": "value", "aggregate": "max"}
        rule = {"type": "rule", "strokeWidth": 2, "opacity": 0.6}
        mean = {"type": "tick", "thickness": 2.5, "size": 14}
        views.append(
            view(
                layer(rule, x=low, x2=high, y=y, color=color),
                layer({"type": "point", "filled": True, "size": 25}, x=x, y=y, color=color),
                layer(mean, x=x | {"aggregate": "mean"}, y=y, color=color),
                data={"values": rows},
            )
            | {"height": {"step": 20}}
        )
    return Picture(views, "Over seeds", "Every seed, their range and their mean.", 290)
