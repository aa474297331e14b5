"""The curves of training, from the metrics of all parts of a run, also of one under way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from nemo_rod.lab.report.figures.drawing import Rows, Spec, by_name, layer, number, short, view
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.style import arm_colour
from nemo_rod.lab.report.under_way import Part
from nemo_rod.roles import ROLES
from nemo_rod.selection.arm_names import parse_arm

_MAX_POINTS = 240  # points of a curve; bounds the page
_MOST_POINTS = 12_000  # points of held-out losses by source
_MOST_SOURCES = 16  # sources with a view of their own
_SMOOTHED = 0.02  # half the window of a smoothed line, as a share of its points
_OURS = {"train", "rod", "validation", "timing", "throughput", "memory"}  # groups of metrics
STEPS = "steps done"
_SUBJECT = parse_arm("rod").label  # its line is the strongest, above the others
_LOSS = "loss (nats per token)"
_DASHES = ([6, 3], [2, 2], [8, 3, 2, 3], [4, 4])  # dashes of variants, which have RoD's colour


def curves_of(parts: Sequence[Part], names: Sequence[str] = ()) -> dict[str, Picture]:
    """Returns the curves that the parts of a run have metrics for, by name.

    Args:
        parts: parts of the run. The base, which is trained longer, has a chart of its own.
        names: arms with colours in the figures of the page, so that the curves have the same.
    """
    trained = [part for part in parts if len(part.metrics)]
    arms = [part for part in trained if part.name != "base"]
    base = [part for part in trained if part.name == "base"]
    known = list(dict.fromkeys([*names, *(part.name for part in trained)]))
    looks = _looks(trained, known)
    columns = dict.fromkeys(key for part in arms for key in part.metrics.columns)  # others', too
    made: list[tuple[str, str, Spec | None]] = [
        ("loss", "Training loss", _lines(_metric(arms, "train/loss"), looks, "training " + _LOSS)),
        ("share", "Share of replay",
         _lines(_metric(arms, "rod/replay_share", 100.0), looks, "replay share (%)")),
        *((f"held_out_{role}", f"Held-out {role} loss, sources alike",
           _lines(_alike(arms, role), looks, f"{role} {_LOSS}", smooth=False))
          for role in ROLES),
        ("sources", "Held-out loss by source", _by_source(arms, looks)),
        *((f"rho_{role}", f"Mean score, {role}",
           _lines(_metric(arms, f"rod/rho_{role}"), looks, "score (nats per token)"))
          for role in ROLES),
        *((re.sub(r"\W", "_", key) + f"-{place}", key, _lines(_metric(arms, key), looks, key))
          for place, key in enumerate(columns)
          if "/" in key and key.partition("/")[0] not in _OURS),
        ("base", "The base: training loss",
         _lines(_metric(base, "train/loss"), looks, "training " + _LOSS)),
    ]  # fmt: skip
    return {
        f"curve-{name}": Picture(spec, title, order=200 + place / 100)
        for place, (name, title, spec) in enumerate(made)
        if spec is not None
    }


def _looks(trained: Sequence[Part], known: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns colour and dash of every arm's line by its label."""
    looks, variants = dict[str, dict[str, Any]](), 0
    for part in trained:
        dash = [1, 0]
        if parse_arm(part.name).kind == "rod_variant":
            dash, variants = _DASHES[variants % len(_DASHES)], variants + 1
        looks[part.label] = {"colour": arm_colour(part.name, known), "dash": dash}
    return looks


def _metric(parts: Sequence[Part], key: str, times: float = 1.0) -> Rows:
    """Returns a metric of the parts' steps, as means of neighbouring steps."""
    rows = []
    for part in parts:
        row, value = part.metrics.finite(key)
        for some in np.array_split(np.arange(len(row)), min(len(row), _MAX_POINTS) or 1):
            if len(some):
                step = int(part.metrics.step_T[row[some[-1]]]) + 1
                mean = short(times * float(value[some].mean()))
                rows.append({"arm": part.label, STEPS: step, "value": mean})
    return rows


def _held_out(parts: Sequence[Part], role: str, most: int) -> Rows:
    """Returns held-out losses by source, from before the first step on."""
    rows = []
    for part in parts:
        for source, key in part.metrics.held_out(role).items():
            row, value = part.metrics.finite(key)
            shown = np.linspace(0, len(row) - 1, min(len(row), most)).round().astype(int)
            steps, losses = part.metrics.step_T[row[shown]] + 1, value[shown]
            points = [(0, part.start[key])] if key in part.start else []
            point = {"arm": part.label, "source": f"{source} ({role})"}
            rows += [
                point | {STEPS: step, "value": short(loss)}
                for step, loss in [*points, *zip(steps.tolist(), losses.tolist(), strict=True)]
            ]
    return [row for row in rows if row["value"] is not None]


def _alike(parts: Sequence[Part], role: str) -> Rows:
    """Returns the means over a role's sources of held-out losses, at steps where all are finite."""
    rows: Rows = []
    for part in parts:
        values: dict[int, list[float]] = {}
        for row in _held_out([part], role, len(part.metrics)):
            values.setdefault(row[STEPS], []).append(row["value"])
        num_sources = len(part.metrics.held_out(role))
        means = [(step, fmean(v)) for step, v in values.items() if len(v) == num_sources]
        for place in np.linspace(0, len(means) - 1, min(len(means), _MAX_POINTS + 1)).round():
            step, mean = means[int(place)]
            rows.append({"arm": part.label, STEPS: step, "value": short(mean)})
    return rows


def _lines(
    rows: Rows, looks: Mapping[str, Mapping[str, Any]], title: str, *,
    smooth: bool = True, facet: str = "",
) -> Spec | None:  # fmt: skip
    """Returns a line per arm; a smoothed one over the raw one, or one in each view of `facet`."""
    rows = [row for row in rows if row.get("value") is not None]
    arms = [arm for arm in looks if any(row["arm"] == arm for row in rows)]
    if not rows:
        return None
    keys = ("arm", STEPS, "value", *([facet] if facet else []))
    order = [*(arm for arm in arms if arm != _SUBJECT), _SUBJECT]
    rows = sorted(rows, key=lambda row: order.index(row["arm"]))
    rows = [{key: row[key] for key in keys} for row in rows]

    def of_arm(look: str) -> Spec:
        scale = {"domain": arms, "range": [looks[arm][look] for arm in arms]}
        return {"field": "arm", "type": "nominal", "title": None, "scale": scale}

    legend = {"symbolType": "stroke", "symbolSize": 400}
    is_subject = f"datum.arm == '{_SUBJECT}'"
    encoding: Spec = {
        "x": number(STEPS, STEPS),
        "y": number("value", title),
        "color": by_name("arm", {arm: looks[arm]["colour"] for arm in arms}, **legend),
        "strokeDash": of_arm("dash"),
        "strokeWidth": {"condition": {"test": is_subject, "value": 3.4}, "value": 1.6},
        "opacity": {"condition": {"param": "picked", "value": 1}, "value": 0.12},
    }
    faint = {"condition": {"param": "picked", "value": 0.25}, "value": 0.05}
    raw = layer("line", opacity=faint, strokeWidth={"value": 1})
    smoothed: Spec = {"mark": "line"}
    if smooth:
        longest = max(sum(row["arm"] == arm for row in rows) for arm in arms)
        half = max(1, round(_SMOOTHED * longest))
        smoothed["transform"] = [{
            "window": [{"op": "mean", "field": "value", "as": "smoothed"}],
            "groupby": ["arm"], "sort": [{"field": STEPS}], "frame": [-half, half],
        }]  # fmt: skip
        smoothed["encoding"] = {"y": number("smoothed", title)}
    smoothed["params"] = [
        {"name": "picked", "select": {"type": "point", "fields": ["arm"]}, "bind": "legend"}
    ]
    tips = [{"field": "arm"}, {"field": STEPS}, {"field": "value", "format": ".4~g"}]
    # the nearest point of a line answers to the pointer
    near = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
    points = layer(
        {"type": "point", "filled": True, "size": 50, "tooltip": True},
        opacity={"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
        strokeWidth={"value": 0},
        tooltip=tips,
    ) | {"params": [{"name": "near", "select": near}]}
    layers = [*([raw] if smooth else []), smoothed, points]
    if not facet:
        return view(*layers, encoding=encoding, data={"values": rows}, height=260)
    return {
        "data": {"values": rows},
        "facet": {"field": facet, "type": "nominal", "title": None},
        "spec": view(*layers, encoding=encoding, height=150),
        "resolve": {"scale": {"y": "independent"}},
    }


def _by_source(arms: Sequence[Part], looks: Mapping[str, Mapping[str, Any]]) -> Spec | None:
    """Returns held-out losses of the sources whose loss changes most, each in its view."""
    keys = {k for part in arms for k in part.metrics.columns if k.startswith("validation/")}
    most = max(8, _MOST_POINTS // max(1, len(arms) * min(len(keys), _MOST_SOURCES)))
    rows = [row for role in ROLES for row in _held_out(arms, role, most)]
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["source"], []).append(row["value"])
    order = sorted(values, key=lambda name: min(values[name]) - max(values[name]))
    shown = set(order[:_MOST_SOURCES])
    kept = [row for row in rows if row["source"] in shown]
    return _lines(kept, looks, "nats per token", smooth=False, facet="source")
