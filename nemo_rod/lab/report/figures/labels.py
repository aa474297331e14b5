"""Text beside marks: Vega drops the labels that do not fit, and a figure needs those of all arms.

Places are in pixels of a plot of a given size, so that labels keep off each other in a larger one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rod.lab.report.figures.drawing import FONT_SIZE, Floats, Rows, Spec, layer
from nemo_rod.lab.report.style import light

SIZES = ((700, 320), (290, 320))  # plots on a desktop and on a phone
_DIRECTIONS = [np.array([math.cos(i * math.pi / 8), math.sin(i * math.pi / 8)]) for i in range(16)]
_DISTANCES = (8.0, 14.0, 24.0, 38.0)  # distances of the text's edge from the mark
_COVERING = 60.0  # cost of covering a mark
_MARK, _NEAR = 7.0, 15.0  # radius of a mark; without a leader


def label_layers(
    rows: Rows,
    x: Spec,
    y: Spec,
    lines: Sequence[Sequence[tuple[float, float]]] = (),
    *,
    most: bool = False,
) -> list[Spec]:
    """Returns layers with a `text` beside the points of rows, and leaders to those far away.

    Args:
        rows: points by the fields of `x` and `y`, with `text`, and `bold` for the more important.
        x: encoding of the horizontal axis, with the `domain` of its scale.
        y: that of the vertical axis, which may be logarithmic.
        lines: paths to keep off where there is room, through points.
        most: whether a label that would cover something is left out.
    """
    shown = sorted((row for row in rows if row["text"]), key=lambda row: not row.get("bold"))
    if not shown:
        return []
    for suffix, size in zip(("", "_narrow"), SIZES, strict=True):
        pixels = [_to_pixels([(row[x["field"]], row[y["field"]]) for row in rows], x, y, size)]
        pixels += [_to_pixels(line, x, y, size) for line in lines]
        mine = _to_pixels([(row[x["field"]], row[y["field"]]) for row in shown], x, y, size)
        dense = [_along(line) for line in pixels[1:]] or [np.empty((0, 2))]
        texts, spared = [row["text"] for row in shown], _COVERING if most else math.inf
        places = _offsets(texts, mine, pixels[0], np.vstack(dense), size, spared)
        for row, place in zip(shown, places, strict=True):
            named = dict(zip(("dx", "dy", "lx", "ly", "seen"), place, strict=True))
            row |= {f"{key}{suffix}": round(value, 1) for key, value in named.items()}

    def by_width(key: str) -> Spec:
        return {"expr": f"narrow ? datum.{key}_narrow : datum.{key}"}

    at = {"x": x, "y": y}
    ends = {"x2": {"field": x["field"]}, "y2": {"field": y["field"]}}
    halo = {"fill": light("surface"), "stroke": light("surface"), "strokeWidth": 3}
    seen = {"opacity": by_width("seen"), "tooltip": None}
    text = {"type": "text", "dx": by_width("dx"), "dy": by_width("dy"), **seen}
    text["fontWeight"] = {"expr": "datum.bold ? 'bold' : 'normal'"}
    colour = {"condition": {"test": "datum.bold", "value": light("rod")}, "value": light("ink")}
    words = {"field": "text", "type": "nominal"}
    leader = {
        "type": "rule", "color": light("muted"), "strokeWidth": 0.7, **seen,
        "x2Offset": by_width("lx"), "y2Offset": by_width("ly"),
    }  # fmt: skip
    return [
        layer(leader, shown, **at, **ends),
        layer(text | halo, shown, **at, text=words),
        layer(text, shown, **at, text=words, color=colour),
    ]


def _to_pixels(points: Sequence[tuple[float, float]], x: Spec, y: Spec, size: Sequence[int]) -> Any:
    pixels = np.array(points, dtype=np.float64).reshape(-1, 2)
    for i, encoding in enumerate((x, y)):
        value, ends = pixels[:, i], np.array(encoding["scale"]["domain"], dtype=np.float64)
        if encoding["scale"].get("type") == "log":
            value, ends = np.log(value), np.log(ends)
        share = (value - ends[0]) / (ends[1] - ends[0])
        pixels[:, i] = size[i] * (share if i == 0 else 1 - share)
    return pixels


def _along(path: Floats) -> Floats:
    """Returns points on the straight lines of a path, five pixels apart."""
    path = np.clip(path, -999, 1999)  # a value of almost zero lies far below a logarithmic axis
    parts = [path[:1]]
    for begin, end in itertools.pairwise(path):
        parts.append(np.linspace(begin, end, 2 + int(np.abs(end - begin).max() // 5)))
    return np.vstack(parts)


def _offsets(
    texts: Sequence[str],
    mine: Floats,
    marks: Floats,
    lines: Floats,
    size: Sequence[int],
    spared: float,
) -> list[tuple[float, float, float, float, float]]:
    """Returns the offsets of every text's centre from its mark, and of its leader's end; 1 if seen.

    Of directions and distances around the mark, the cheapest is chosen: covering another label or
    leaving the plot costs most, covering a mark or a leader less, and a line least. A text that
    costs `spared` or more is not seen.
    """
    boxes, leaders, offsets = np.empty((0, 4)), np.empty((0, 2)), []
    for text, mark in zip(texts, mine, strict=True):
        half = np.array([0.29 * FONT_SIZE * len(text) + 2, 0.6 * FONT_SIZE])
        others = marks[np.abs(marks - mark).max(axis=1) > 1]
        best, cheapest = (half, half, np.zeros(4), leaders[:0]), math.inf
        for distance, direction in itertools.product(_DISTANCES, _DIRECTIONS):
            cost = distance + 3 * (1 - direction[0])
            if cost >= cheapest:
                continue  # spares the slow part
            offset = direction * (distance + half)
            box = np.concatenate([offset + mark - half, offset + mark + half])
            over = np.minimum(boxes[:, 2:], box[2:]) - np.maximum(boxes[:, :2], box[:2])
            cost += 200.0 * (over > 0).all(axis=1).sum() + _COVERING * _inside(marks, box, _MARK)
            cost += 100.0 * min(1, _inside(leaders, box)) + min(30, 6 * _inside(lines, box))
            cost += 500.0 * bool((box[:2] < 0).any() or (box[2:] > (size[0] + 4, size[1])).any())
            end, leader = np.zeros(2), leaders[:0]
            near = np.clip((0, 0), offset - half, offset + half)
            if cost < cheapest and math.hypot(*near) > _NEAR:
                end, leader = near, np.linspace(mark, near + mark, 12)[2:]
                cost += 100.0 * sum(_inside(leader, other) > 0 for other in boxes)
                cost += _COVERING * sum(_inside(leader, np.tile(o, 2), _MARK) > 0 for o in others)
            if cost < cheapest:
                cheapest, best = cost, (offset, end, box, leader)
        if seen := cheapest < spared:
            boxes, leaders = np.vstack([boxes, best[2]]), np.vstack([leaders, best[3]])
        offsets.append((*best[0].tolist(), *best[1].tolist(), float(seen)))
    return offsets


def _inside(points: Floats, box: Floats, margin: float = 0.0) -> int:
    """Returns the number of points in a box."""
    inside = (points >= box[:2] - margin) & (points <= box[2:] + margin)
    return int(inside.all(axis=1).sum())
