"""The roofline picture: FLOP/s over FLOPs per byte, below what the device reaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


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
    """Writes the picture; points are numbered, and the legend says what each is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(9.6, 5.2), layout="constrained")
    ridge = roofline.ceiling / roofline.bandwidth
    least = min([p.intensity for p in roofline.points], default=ridge)
    most = max([p.intensity for p in roofline.points], default=ridge)
    x = np.geomspace(min(least, ridge) / 3, max(most, ridge) * 3, 200)
    roof = np.minimum(roofline.ceiling, x * roofline.bandwidth)
    axes.loglog(x, roof, color="0.25", linewidth=1.6)
    axes.annotate(
        f"matrix products {roofline.ceiling:.3g} TFLOP/s",
        (x[-1], roofline.ceiling), (-4, 5), textcoords="offset points", ha="right", color="0.25",
    )  # fmt: skip
    axes.axvline(ridge, color="0.8", linewidth=1, zorder=0)
    axes.annotate(
        f"copies {roofline.bandwidth:.3g} TB/s", (x[0], roof[0]), (14, -8),
        textcoords="offset points", ha="left", va="top", color="0.25",
    )  # fmt: skip
    colours = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, max(1, len(roofline.points))))
    for number, (point, colour) in enumerate(zip(roofline.points, colours, strict=True), 1):
        share = 100 * point.tflops / min(roofline.ceiling, point.intensity * roofline.bandwidth)
        label = f"{number}  {point.name}: {point.tflops:.3g} TFLOP/s, {share:.2g} % of the roof"
        axes.plot(
            point.intensity, point.tflops, "o", markersize=13, color=colour, alpha=0.85,
            label=label, markeredgewidth=0,
        )  # fmt: skip
        axes.annotate(
            str(number), (point.intensity, point.tflops), color="white", fontsize=8,
            ha="center", va="center",
        )  # fmt: skip
    lowest = min([p.tflops for p in roofline.points], default=roofline.ceiling / 10)
    axes.set_ylim(min(lowest, roof[0]) / 2, roofline.ceiling * 2)
    axes.set_xlim(x[0], x[-1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOPs per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(roofline.device)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, markerscale=0.6)
    figure.savefig(file, dpi=144)
    pyplot.close(figure)
