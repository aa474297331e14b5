"""What RoD replays over time: the emergent share by source, and the scores it emerges from.

Shape suffixes: T = steps, B = bins of consecutive steps, O = sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nemo_rod.report.figures.canvas import BOTTOM, LEFT, TOP, Canvas
from nemo_rod.report.figures.labels import label_right, label_width, shorten
from nemo_rod.report.history import History
from nemo_rod.report.style import NUM_SOURCES, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_MAX_BINS, _MIN_BINS = 80, 20
_BLOCKS_PER_BIN = 256  # enough for a share to be steady


def replay_share(
    history: History, deciles: Sequence[float] | None, canvas: Canvas
) -> Figure | None:
    """Replay share of the trained batch over training, stacked by source, with its deciles."""
    steady = len(history.step_T) * history.batch_size // _BLOCKS_PER_BIN
    step_B, chosen_BO = _binned(
        history,
        history.chosen_TO / history.batch_size,
        max_bins=max(_MIN_BINS, min(steady, _MAX_BINS)),
    )
    names, colours, share_BO = _stack(history, chosen_BO)
    if not names:
        return None
    names = [shorten(name, canvas) for name in names]
    height = 3.5 if canvas.narrow else 3.9
    figure = canvas.figure(height)
    right = label_width(names, canvas)
    box = (LEFT, BOTTOM, canvas.width - LEFT - right, height - BOTTOM - TOP)
    axes = canvas.axes(figure, box, "training step", "share of the trained batch (%)")
    top_BO = 100 * np.cumsum(share_BO, axis=1)
    bottom_B = np.zeros(len(step_B))
    for i, colour in enumerate(colours):
        axes.fill_between(
            step_B, bottom_B, top_BO[:, i], color=colour, alpha=0.85, linewidth=0.8,
            edgecolor=light("surface"), zorder=2,
        )  # fmt: skip
        bottom_B = top_BO[:, i]
    axes.plot(step_B, bottom_B, color=light("ink"), linewidth=1.6, zorder=3)
    highest = max(float(bottom_B.max()), 100 * max(deciles or [0.0]), 1.0)
    axes.set_ylim(0, 1.22 * highest)
    axes.set_xlim(history.step_T[0], history.step_T[-1])
    axes.grid(visible=False, axis="x")
    if deciles:
        _draw_deciles(axes, history, deciles, (step_B, bottom_B), canvas)
    last_B = slice(-max(len(step_B) // 10, 1), None)
    edges_O = np.concatenate([[0.0], top_BO[last_B].mean(axis=0)])
    label_right(axes, names, list((edges_O[:-1] + edges_O[1:]) / 2), colours, canvas)
    return figure


def _draw_deciles(
    axes: Axes,
    history: History,
    deciles: Sequence[float],
    line: tuple[Floats, Floats],
    canvas: Canvas,
) -> None:
    """A dot at every decile's mean, its number above the `line` of shares, clear of the bands."""
    for part, share in zip(np.array_split(history.step_T, len(deciles)), deciles, strict=True):
        centre = (part[0] + part[-1]) / 2
        axes.plot(
            centre, 100 * share, "o", color=light("ink"), markerfacecolor=light("surface"),
            markersize=5, markeredgewidth=1.3, zorder=5,
        )  # fmt: skip
        step_B, share_B = line
        near_B = share_B[np.abs(step_B - centre) <= 0.35 * len(part)]
        above = max(100 * share, *near_B)
        axes.annotate(
            f"{100 * share:.0f}", (centre, above), (0, 10), textcoords="offset points",
            ha="center", va="center", color=light("ink"), fontsize=canvas.font_size,
            fontweight="bold", zorder=6,
        )  # fmt: skip


def _stack(history: History, share_BO: Floats) -> tuple[list[str], list[str], Floats]:
    """Names, colours and shares of the bands: replay sources, the smallest ones taken together."""
    replay = [i for i in range(len(history.source_names)) if history.is_replay_O[i]]
    replay = [i for i in replay if share_BO[:, i].sum() > 0]
    by_size = sorted(replay, key=lambda i: -share_BO[:, i].sum())
    own = by_size if len(by_size) <= NUM_SOURCES else by_size[: NUM_SOURCES - 1]
    rest = by_size[len(own) :]
    # Colours go by the order of sources in the store, bands from the largest up.
    names = [history.source_names[i] for i in own]
    colours = [light(f"source-{sorted(own).index(i)}") for i in own]
    columns = [share_BO[:, i] for i in own]
    if rest:
        names.append(f"{len(rest)} others")
        colours.append(light("source-rest"))
        columns.append(share_BO[:, rest].sum(axis=1))
    return names, colours, np.array(columns).T


def scores(history: History, canvas: Canvas) -> Figure | None:
    """Mean scores of adaptation and replay candidates over training, with the threshold tau."""
    if not history.is_scored:
        return None
    series = [
        ("\u03c1 adaptation", light("adaptation"), "-", history.rho_adaptation_T),
        ("\u03c1 replay", light("replay"), "-", history.rho_replay_T),
        ("\u03c4 threshold", light("ink"), (0, (4, 2)), history.threshold_T),
    ]
    series = [row for row in series if np.isfinite(row[3]).any()]
    names = [row[0] for row in series]
    height = 3.3 if canvas.narrow else 3.6
    figure = canvas.figure(height)
    right = label_width(names, canvas)
    box = (LEFT, BOTTOM, canvas.width - LEFT - right, height - BOTTOM - TOP)
    axes = canvas.axes(figure, box, "training step", "mean reducible loss (nats per token)")
    ends = []
    for _, colour, style, value_T in series:
        step_B, value_B1 = _binned(history, value_T[:, None])
        value_B = value_B1[:, 0]
        axes.plot(step_B, value_B, color=colour, linestyle=style, linewidth=1.8, zorder=3)
        ends.append(float(value_B[np.isfinite(value_B)][-1]))
    axes.axhline(0, color=light("rule"), linewidth=1, zorder=1)
    axes.set_xlim(history.step_T[0], history.step_T[-1])
    axes.grid(visible=False, axis="x")
    label_right(axes, names, ends, [row[1] for row in series], canvas)
    return figure


def _binned(history: History, value_TO: Floats, max_bins: int = _MAX_BINS) -> tuple[Floats, Floats]:
    """Means over parts of consecutive steps: mean step [B] and mean values [B, O]."""
    num_bins = min(len(history.step_T), max_bins)
    step_B = np.array([part.mean() for part in np.array_split(history.step_T, num_bins)])
    value_BO = np.array([_mean_rows(part) for part in np.array_split(value_TO, num_bins)])
    # The picture spans the whole run although the outer bins' centres do not.
    step_B[0], step_B[-1] = history.step_T[0], history.step_T[-1]
    return step_B, value_BO


def _mean_rows(value_TO: Floats) -> Floats:
    """Mean over steps, of those that have a value; NaN where none has."""
    finite_TO = np.isfinite(value_TO)
    count_O = finite_TO.sum(axis=0)
    total_O = np.where(finite_TO, value_TO, 0.0).sum(axis=0)
    mean_O: Floats = np.divide(
        total_O, count_O, out=np.full(value_TO.shape[1], np.nan), where=count_O > 0
    )
    return mean_O
