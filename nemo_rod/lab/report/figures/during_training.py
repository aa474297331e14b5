"""Training: the emergent replay share by source, and the scores that cause it.

Shape suffixes: T = steps, B = bins of consecutive steps, O = sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_rod.lab.report.figures.canvas import FONT_SIZE, HEADING, TOP, add_axes, panels
from nemo_rod.lab.report.figures.labels import label_right, label_width, shorten
from nemo_rod.lab.report.history import Counts, History, finite_mean
from nemo_rod.lab.report.paper import category_of, category_role, paper, title_of
from nemo_rod.lab.report.results import Results, Shown
from nemo_rod.lab.report.run_files import Run
from nemo_rod.lab.report.style import NUM_SOURCES, light

Floats = npt.NDArray[np.float64]

_MAX_BINS, _MIN_BINS = 80, 20
_BLOCKS_PER_BIN = 256  # enough for a stable share
_MAX_PASSES = 8  # that are marked


def replay_share(shown: Sequence[Shown]) -> Figure | None:
    """Draws the replay share of the batch over training, stacked by source, with its deciles.

    Sources of the paper are grouped by category; for the lines across see `mark_phases`.
    """
    runs = [(run, results, history, *_stacked(history)) for run, results, history in _rod(shown)]
    runs = [row for row in runs if row[4]]
    if not runs:
        return None
    above = HEADING * (len(shown) > 1)
    right = label_width([text for row in runs for text in row[4]])
    figure, boxes = panels(len(runs), 3.5 + above, top=TOP + above, right=right)
    for (run, results, history, step_B, texts, colours, share_BO), box in zip(
        runs, boxes, strict=True
    ):
        title, heading = "share of the trained batch (%)", title_of(results["recipe"])
        axes = add_axes(figure, box, "training step", title, heading=heading if above else "")
        top_BO = 100 * np.cumsum(share_BO, axis=1)
        bottom_B = np.zeros(len(step_B))
        for i, colour in enumerate(colours):
            axes.fill_between(
                step_B, bottom_B, top_BO[:, i], color=colour, alpha=0.85, linewidth=0.8,
                edgecolor=light("surface"), zorder=2,
            )  # fmt: skip
            bottom_B = top_BO[:, i]
        axes.plot(step_B, bottom_B, color=light("ink"), linewidth=1.6, zorder=3)
        deciles = results["arms"]["rod"]["share_by_decile"] or []
        axes.set_ylim(0, 1.3 * max(float(bottom_B.max()), 100 * max(deciles, default=0.0), 1.0))
        axes.set_xlim(history.step_T[0], max(history.step_T[-1], history.step_T[0] + 1))
        axes.grid(visible=False, axis="x")
        parts = np.array_split(history.step_T, len(deciles)) if deciles else []
        for part, share in zip(parts, deciles, strict=True):
            centre = (part[0] + part[-1]) / 2
            axes.plot(
                centre, 100 * share, "o", color=light("ink"), markerfacecolor=light("surface"),
                markersize=5, markeredgewidth=1.3, zorder=5,
            )  # fmt: skip
            # the number is above the dot, the line and the bands
            near_B = np.abs(step_B - centre) <= 0.35 * len(part)  # none in a short run
            top = max([100 * share, *bottom_B[near_B]])
            axes.annotate(
                f"{100 * share:.0f}", (centre, top), (0, 10), textcoords="offset points",
                ha="center", va="center", color=light("ink"), fontsize=FONT_SIZE,
                fontweight="bold", zorder=6,
            )  # fmt: skip
        mark_phases(axes, run)
        last_B = slice(-max(len(step_B) // 10, 1), None)
        edges_O = np.concatenate([[0.0], top_BO[last_B].mean(axis=0)])
        label_right(axes, texts, list((edges_O[:-1] + edges_O[1:]) / 2), colours)
    return figure


def _rod(shown: Sequence[Shown]) -> list[tuple[Run, Results, History]]:
    """Returns the runs that have a curriculum of RoD, with their results and that curriculum."""
    runs = [(run, results, run.arms["rod"]) for run, results in shown if "rod" in run.arms]
    return [(run, results, rod.history) for run, results, rod in runs if rod.history]


def mark_phases(axes: Axes, run: Run, *, arm: str = "rod") -> None:
    """Marks passes over the adaptation blocks of a run's arm, and the start of annealing.

    1x is the step by which as many adaptation blocks were trained on as the store has.
    """
    history, facts = run.arms[arm].history, run.arms[arm].facts
    assert history is not None
    passes = exposures(history, history.chosen_TO, sum(run.block_counts["adaptation"].values()))
    marks = [(step, f"{times}\N{MULTIPLICATION SIGN}", "muted") for times, step in passes]
    if facts.get("anneals_at") is not None:
        marks.append((facts["anneals_at"], "annealing", "other"))
    for step, text, colour in marks:
        axes.axvline(step, color=light(colour), linewidth=1, linestyle=(0, (3, 3)), zorder=4)
        axes.annotate(
            text, (step, 1), (3, -2 - 11 * (colour == "other")),
            xycoords=("data", "axes fraction"), textcoords="offset points", ha="left", va="top",
            color=light(colour), fontsize=FONT_SIZE, zorder=6,
        )  # fmt: skip


def exposures(history: History, count_TO: Counts, num_adaptation: int) -> list[tuple[int, int]]:
    """Returns multiples of the adaptation corpus, each with the first step that reached it.

    All of them, or every second, fifth, tenth, ... where the figure has no room for so many.
    Counted are the blocks in `count_TO`, by step and source: those drawn, or those trained on.
    """
    if num_adaptation <= 0:
        return []
    total_T = count_TO[:, ~history.is_replay_O].sum(axis=1).cumsum()
    whole = int(total_T[-1]) // num_adaptation
    rounds = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    every = next(number for number in rounds if whole // number <= _MAX_PASSES)
    reached = {
        n: np.searchsorted(total_T, n * num_adaptation) for n in range(every, whole + 1, every)
    }
    return [(n, int(history.step_T[i])) for n, i in reached.items()]


def _stacked(history: History) -> tuple[Floats, list[str], list[str], Floats]:
    """Returns mean steps, and labels, colours and shares of the bands, largest first.

    Bands are the replay sources, or the paper's categories of them; the smallest ones are merged.
    """
    steady = len(history.step_T) * history.batch_size // _BLOCKS_PER_BIN
    bins = max(_MIN_BINS, min(steady, _MAX_BINS))
    step_B, share_BO = binned(history, history.chosen_TO / history.batch_size, max_bins=bins)
    bands: dict[str, Floats] = {}
    for i in np.flatnonzero(history.is_replay_O):
        name = category_of(history.source_names[i]) or history.source_names[i]
        bands[name] = bands.get(name, 0.0) + share_BO[:, i]
    # Colours follow the order of sources in the store, bands are stacked from the largest up.
    place = {name: i for i, name in enumerate(n for n in bands if bands[n].sum() > 0)}
    by_size = sorted(place, key=lambda name: -bands[name].sum())
    own = by_size if len(by_size) <= NUM_SOURCES else by_size[: NUM_SOURCES - 1]
    rest = by_size[len(own) :]
    order = sorted(own, key=lambda name: place[name])
    names, columns = [shorten(name) for name in own], [bands[name] for name in own]
    fixed = paper()["categories"]
    colours = [
        light(category_role(name) if name in fixed else f"source-{order.index(name)}")
        for name in own
    ]
    if rest:
        names.append(f"{len(rest)} others")
        colours.append(light("source-rest"))
        columns.append(np.sum([bands[name] for name in rest], axis=0))
    return step_B, names, colours, np.array(columns).T


def scores(shown: Sequence[Shown]) -> Figure | None:
    """Draws mean scores of both roles' candidates and tau over training, above RoD's share."""
    runs = [row for row in _rod(shown) if row[2].is_scored]
    if not runs:
        return None
    above = HEADING * (len(shown) > 1)
    right = label_width(list(_SERIES))
    figure, boxes = panels(2 * len(runs), 3.0 + above, top=TOP + above, right=right)
    title = "mean reducible loss (nats per token)"
    for (run, results, history), box, below in zip(runs, boxes[::2], boxes[1::2], strict=True):
        heading = title_of(results["recipe"]) if above else ""
        axes = add_axes(figure, box, "", title, heading=heading)
        ends: dict[str, float] = {}
        for name, (colour, style, attribute) in _SERIES.items():
            value_T: Floats = getattr(history, attribute)
            if not np.isfinite(value_T).any():
                continue
            step_B, value_B = binned(history, value_T)
            axes.plot(
                step_B, value_B, color=light(colour), linestyle=style, linewidth=1.8, zorder=3
            )
            ends[name] = float(value_B[np.isfinite(value_B)][-1])
        axes.axhline(0, color=light("rule"), linewidth=1, zorder=1)
        share = add_axes(figure, below, "training step", "replay share of the batch (%)")
        step_B, share_B = binned(history, 100 * history.share_T)
        share.plot(step_B, share_B, color=light("rod"), linewidth=1.8, zorder=3)
        share.set_ylim(0, 1.25 * max(1.0, float(share_B.max())))
        for one in (axes, share):
            one.set_xlim(history.step_T[0], max(history.step_T[-1], history.step_T[0] + 1))
            one.grid(visible=False, axis="x")
            mark_phases(one, run)
        colours = [light(_SERIES[name][0]) for name in ends]
        label_right(axes, list(ends), list(ends.values()), colours)
    return figure


_SERIES = {
    "\u03c1 adaptation": ("adaptation", "-", "rho_adaptation_T"),
    "\u03c1 replay": ("replay", "-", "rho_replay_T"),
    "\u03c4 threshold": ("ink", (0, (4, 2)), "threshold_T"),
}


def binned(history: History, value_TO: Floats, max_bins: int = _MAX_BINS) -> tuple[Floats, Floats]:
    """Returns means over bins of consecutive steps: mean step [B], mean values [B, O] or [B]."""
    num_bins = min(len(history.step_T), max_bins)
    step_B = np.array([part.mean() for part in np.array_split(history.step_T, num_bins)])
    parts = np.array_split(value_TO, num_bins)
    value_BO = np.array([finite_mean(part, axis=0) for part in parts])
    # The line spans the whole run, although the centres of the outer bins do not.
    step_B[0], step_B[-1] = history.step_T[0], history.step_T[-1]
    return step_B, value_BO
