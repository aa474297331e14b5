"""The roofline picture: FLOP/s over FLOPs per byte, below what the device reaches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from nemo_rod.lab.report.figures.drawing import (
    FONT_SIZE,
    Rows,
    by_name,
    files_of,
    layer,
    number,
    view,
)
from nemo_rod.lab.report.style import light

COLOURS = [light(f"source-{place}") for place in range(8)]


@dataclass(frozen=True)
class Point:
    """One measured piece of work: FLOPs per byte that it must move, and TFLOP/s that it reached."""

    name: str
    intensity: float
    tflops: float


@dataclass(frozen=True)
class Roofline:
    """What a device reaches in matrix products (TFLOP/s) and copies (TB/s), and what ran on it."""

    device: str
    ceiling: float
    bandwidth: float
    points: tuple[Point, ...]


def draw(roofline: Roofline, file: Path) -> None:
    """Writes the picture, and its specification and SVG beside it.

    Points are numbered, and the legend says what each is. Without vl-convert, there is the
    specification alone.
    """
    ridge = roofline.ceiling / roofline.bandwidth
    intensities = [ridge, *(point.intensity for point in roofline.points)]
    ends = [min(intensities) / 3, ridge, max(intensities) * 3]
    roof: Rows = [
        {"x": x, "y": min(roofline.ceiling, x * roofline.bandwidth), "text": text}
        for x, text in zip(ends, (f"copies {roofline.bandwidth:.3g} TB/s", "",
        f"matrix products {roofline.ceiling:.3g} TFLOP/s"), strict=True)
    ]  # fmt: skip
    rows: Rows = []
    for place, point in enumerate(roofline.points, 1):
        share = 100 * point.tflops / min(roofline.ceiling, point.intensity * roofline.bandwidth)
        name = f"{place}  {point.name}: {point.tflops:.3g} TFLOP/s, {share:.2g} % of the roof"
        rows.append({"x": point.intensity, "y": point.tflops, "text": str(place), "name": name})
    lowest = min(row["y"] for row in (roof[0], *rows))
    ranges = {"x": (ends[0], ends[-1]), "y": (lowest / 2, 2 * roofline.ceiling)}
    titles = {"x": "FLOPs per byte that must be moved", "y": "TFLOP/s"}
    ticks = [float(f"{digit}e{power}") for power in range(-9, 9) for digit in (1, 3)]
    at = {
        axis: number(axis, titles[axis], scale={"type": "log", "domain": ends},
                     axis={"values": [tick for tick in ticks if ends[0] <= tick <= ends[1]],
                           "format": "~g", "labelOverlap": False})
        for axis, ends in ranges.items()
    }  # fmt: skip
    colours = dict(zip((row["name"] for row in rows), cycle(COLOURS), strict=False))
    grey = {"color": light("muted"), "fontSize": FONT_SIZE}
    picture = view(
        layer({"type": "line", "color": light("ink")}, roof, **at),
        layer({"type": "rule", "color": light("rule")}, roof[1:2], x=at["x"]),
        layer({"type": "text", "align": "left", "dx": 14, "dy": 8, **grey}, roof[:1], **at,
              text={"field": "text"}),
        layer({"type": "text", "align": "right", "dy": -10, **grey}, roof[2:], **at,
              text={"field": "text"}),
        *((
            layer({"type": "circle", "size": 260, "opacity": 0.85}, rows, **at,
                  color=by_name("name", colours, orient="bottom", columns=2, labelLimit=0)),
            layer({"type": "text", "color": light("surface")}, rows, **at, text={"field": "text"}),
        ) if rows else ()),
        title=roofline.device, height=400,
    )  # fmt: skip
    for name, content in files_of(file.stem, picture):
        data = content.encode() if isinstance(content, str) else content
        file.with_name(name).write_bytes(data)
