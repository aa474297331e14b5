"""How training goes: loss, replay share and held-out losses by role, arm by arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nemo_rod.lab.report.figures.canvas import add_axes, panels
from nemo_rod.lab.report.figures.labels import label_right, label_width
from nemo_rod.lab.report.style import light
from nemo_rod.lab.report.under_way import Part

_MAX_POINTS = 200
Points = tuple[list[float], list[float]]


def under_way(parts: Sequence[Part]) -> Figure | None:
    """Draws every trained part's metrics over its steps; None if no part has a step."""
    parts = [part for part in parts if part.rows]
    curves = {title: {part.label: of(part) for part in parts} for title, of in _PANELS}
    curves = {
        title: {label: points for label, points in by_label.items() if points[0]}
        for title, by_label in curves.items()
    }
    curves = {title: by_label for title, by_label in curves.items() if by_label}
    if not curves:
        return None
    right = label_width([part.label for part in parts])
    figure, boxes = panels(len(curves), 2.9, right=right)
    colours = {part.label: light(f"source-{i % 8}") for i, part in enumerate(parts)}
    for (title, by_label), box in zip(curves.items(), boxes, strict=True):
        axes = add_axes(figure, box, "steps done", title)
        for label, (x, y) in by_label.items():
            mark = "o" if len(x) < 12 else ""
            axes.plot(x, y, color=colours[label], linewidth=1.5, marker=mark, markersize=3)
        ends = [y[-1] for _, y in by_label.values()]
        label_right(axes, list(by_label), ends, [colours[label] for label in by_label])
    return figure


def _smooth(key: str, scale: float = 1.0) -> Callable[[Part], Points]:
    """Returns what takes a metric of every step from a part, as means of neighbouring steps."""

    def points(part: Part) -> Points:
        known = [(r["step"] + 1, r[key]) for r in part.rows if r.get(key) is not None]
        bins = np.array_split(np.array(known, dtype=np.float64).reshape(-1, 2), _MAX_POINTS)
        means = [part.mean(axis=0) for part in bins if len(part)]
        return [float(m[0]) for m in means], [scale * float(m[1]) for m in means]

    return points


def _held_out(role: str) -> Callable[[Part], Points]:
    """Returns what takes the mean of a role's sources at every validation from a part."""
    prefix = f"validation/{role}/"

    def mean(row: dict[str, Any]) -> float | None:
        values = [value for key, value in row.items() if key.startswith(prefix)]
        return sum(values) / len(values) if values else None

    def points(part: Part) -> Points:
        looks = [(0, mean(part.start)), *((row["step"] + 1, mean(row)) for row in part.rows)]
        known = [(float(step), loss) for step, loss in looks if loss is not None]
        return [step for step, _ in known], [loss for _, loss in known]

    return points


_PANELS: tuple[tuple[str, Callable[[Part], Points]], ...] = (
    ("training loss (nats)", _smooth("train/loss")),
    ("share of replay (%)", _smooth("rod/replay_share", 100.0)),
    ("held-out adaptation loss, sources alike (nats)", _held_out("adaptation")),
    ("held-out replay loss, sources alike (nats)", _held_out("replay")),
)
