"""Training: the emergent replay share by source, and the scores that cause it.

Shape suffixes: T = steps, B = bins of consecutive steps, O = sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_rod.lab.history import Floats, History, finite_mean
from nemo_rod.lab.report.figures.drawing import (
    Rows,
    Spec,
    as_is,
    by_name,
    layer,
    line_at,
    number,
    short,
    shortened,
    view,
)
from nemo_rod.lab.report.figures.picture import Picture
from nemo_rod.lab.report.paper import category_of, category_role, paper, title_of
from nemo_rod.lab.report.results import Results, RunResults
from nemo_rod.lab.report.run_files import Run
from nemo_rod.lab.report.style import NUM_SOURCES, light

_MAX_BINS, _MIN_BINS = 80, 20
_BLOCKS_PER_BIN = 256  # enough for a stable share
_MAX_PASSES = 8  # more are not marked
_STEP = "training step"
_TINTS = ("fixed-0", "rod", "fixed-2", "fixed-4", "merge", "other")  # m = 1.5, 2, 4, ...


def replay_share(shown: Sequence[RunResults]) -> Picture | None:
    """Draws the replay share of the batch over training, stacked by source, with its tenths.

    Sources of the paper are grouped by category.
    """
    views = []
    for run, results, history in _rod(shown):
        step_B, colours, share_BO = _replay_bands(history)
        if not colours:
            continue
        rows = [
            {_STEP: short(step), "source": name, "share": short(100 * value), "place": place}
            for place, name in enumerate(colours)
            for step, value in zip(step_B, share_BO[:, place], strict=True)
        ]
        deciles = results["arms"]["rod"]["share_by_decile"] or []
        parts = np.array_split(history.step_T, len(deciles)) if deciles else []
        tenths = [
            {_STEP: short((part[0] + part[-1]) / 2), "share": short(100 * share)}
            for part, share in zip(parts, deciles, strict=True)
        ]
        most = 125 * max(float(share_BO.sum(axis=1).max()), *deciles, 0.01)
        x, y = _steps(history), number("share", "share of the trained batch (%)",
                                       scale={"domain": [0, short(most)]})  # fmt: skip
        band = {"type": "area", "opacity": 0.85, "stroke": light("surface"), "strokeWidth": 0.6}
        dot = {"type": "point", "filled": True, "opacity": 1, "fill": light("surface"),
               "stroke": light("ink"), "size": 35}  # fmt: skip
        words: Spec = {"type": "text", "dy": -12, "fontWeight": "bold"}
        halo = {"fill": light("surface"), "stroke": light("surface"), "strokeWidth": 4}
        at, percent = {"x": x, "y": y}, {"field": "share", "format": ".0f", "type": "quantitative"}
        views.append(
            view(
                layer(band, rows, x=x, y=y | {"stack": "zero"}, color=by_name("source", colours),
                      order={"field": "place"}),
                layer({"type": "line", "color": light("ink"), "strokeWidth": 2}, rows, x=x,
                      y=y | {"aggregate": "sum"}),
                *_phases(run, history),
                layer(dot, tenths, **at),
                layer(words | halo, tenths, **at, text=percent),
                layer(words, tenths, **at, text=percent),
                title=title_of(results["recipe"]) if len(shown) > 1 else "",
            )
        )  # fmt: skip
    text = (
        "Bands are replay sources, or the paper's categories of them; the line is their sum: the "
        "replay share of the trained batch. Dots are means over tenths of the run, in percent. 1× "
        "and 2× mark one and two passes over the adaptation blocks, and “annealing” the step from "
        "which the learning rate falls."
    )
    return Picture(views, "Replay over training, by source", text, 110) if views else None


def scores(shown: Sequence[RunResults]) -> Picture | None:
    """Draws mean scores of both roles' candidates, and tau, over training."""
    views = []
    for run, results, history in _rod(shown):
        if not history.is_scored:
            continue
        series: dict[str, tuple[str, Floats]] = {
            "\u03c1 adaptation": (light("adaptation"), history.rho_TR[:, 0].astype(np.float64)),
            "\u03c1 replay": (light("replay"), history.rho_TR[:, 1].astype(np.float64)),
            "\u03c4 threshold": (light("ink"), history.threshold_T),
        }
        rows: Rows = []
        for name, (_, value_T) in series.items():
            step_B, value_B = bin_means(history.step_T, value_T)
            rows += _rows(step_B, value_B, name=name)
        x = _steps(history)
        score = number("value", "mean score (nats per token)")
        dashed = {"condition": {"test": "datum.name == '\u03c4 threshold'", "value": [4, 3]},
                  "value": [1, 0]}  # fmt: skip
        colours = {name: colour for name, (colour, _) in series.items()}
        line = {"type": "line", "strokeWidth": 2}
        views.append(
            view(
                line_at(0),
                layer(line, rows, x=x, y=score, color=by_name("name", colours, symbolType="stroke"),
                      strokeDash=dashed),
                *_phases(run, history),
                title=title_of(results["recipe"]) if len(shown) > 1 else "", height=240,
            )
        )  # fmt: skip
    text = (
        "Mean scores of the adaptation candidates (left to learn) and of the replay candidates "
        "(forgotten), and the lowest score of a chosen block; the share of replay follows."
    )
    return Picture(views, "Scores of adaptation and replay", text, 120) if views else None


def shares_of(histories: Mapping[str, History | None], num_adaptation: int) -> list[Spec]:
    """Returns a view of the replay share of several arms by label, with their passes as ticks."""
    rows, ticks, colours = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, str]()
    for place, (label, history) in enumerate(histories.items()):
        if history is None:
            continue
        colours[label] = light(_TINTS[place % len(_TINTS)])
        step_B, share_B = bin_means(history.step_T, 100 * history.share_T)
        rows += _rows(step_B, share_B, name=label)
        passed = [step for _, step in passes(history, history.drawn_TR[:, 0], num_adaptation)]
        ticks += _rows(np.array(passed), np.interp(passed, step_B, share_B), name=label)
    x, y = number(_STEP, _STEP), number("value", "replay share (%)", scale={"zero": True})
    tick = {"type": "tick", "orient": "vertical", "thickness": 2, "size": 14}
    at: Spec = {"x": x, "y": y, "color": by_name("name", colours)}
    line, marked = layer("line", rows, **at), layer(tick, ticks, **at)
    return [view(line, marked, height=240)] if rows else []


def _rod(shown: Sequence[RunResults]) -> list[tuple[Run, Results, History]]:
    """Returns the runs that have a curriculum of RoD, with their results and that curriculum."""
    runs = [(run, results, run.arms["rod"]) for run, results in shown if "rod" in run.arms]
    return [(run, results, rod.history) for run, results, rod in runs if rod.history]


def _steps(history: History) -> Spec:
    first, last = int(history.step_T[0]), int(history.step_T[-1])
    return number(
        _STEP, _STEP, scale={"domain": [first, max(last, first + 1)]}, axis={"grid": False}
    )


def _rows(step_B: Floats, value_B: Floats, **more: Any) -> Rows:
    pairs = zip(step_B.tolist(), value_B.tolist(), strict=True)
    rows = [{_STEP: short(step), "value": short(value), **more} for step, value in pairs]
    return [row for row in rows if row["value"] is not None]


def _phases(run: Run, history: History, *, arm: str = "rod") -> list[Spec]:
    """Returns marks of passes over the adaptation blocks of a run, and the start of annealing.

    1x is the step by which as many adaptation blocks were trained on as the store has.
    """
    count = sum(run.block_counts["adaptation"].values())
    marks = [
        {_STEP: step, "text": f"{times}\N{MULTIPLICATION SIGN}", "colour": light("muted"), "y": 6}
        for times, step in passes(history, history.chosen_TR[:, 0], count)
    ]
    if (begin := run.arms[arm].facts.get("anneals_at")) is not None:
        marks.append({_STEP: begin, "text": "annealing", "colour": light("other"), "y": 20})
    at: Spec = {"x": _steps(history), "color": as_is("colour")}
    words = {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "tooltip": None}
    rule = {"type": "rule", "strokeDash": [3, 3], "tooltip": None}
    texts = layer(words, marks, **at, y={"field": "y", "type": "quantitative", "scale": None,
                                         "axis": None}, text={"field": "text"})  # fmt: skip
    return [layer(rule, marks, **at), texts] if marks else []


def passes(history: History, count_T: Any, num_adaptation: int) -> list[tuple[int, int]]:
    """Returns multiples of the adaptation corpus, each with the first step that reached it.

    All of them, or every second, fifth, tenth, ... where the figure has no room for so many.
    Counted are the adaptation blocks in `count_T`: those drawn, or those trained on.
    """
    if num_adaptation <= 0:
        return []
    total_T = np.cumsum(count_T, dtype=np.int64)
    rounds = int(total_T[-1]) // num_adaptation
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    every = next(number for number in steps if rounds // number <= _MAX_PASSES)
    reached = {
        n: np.searchsorted(total_T, n * num_adaptation) for n in range(every, rounds + 1, every)
    }
    return [(n, int(history.step_T[i])) for n, i in reached.items()]


def bin_means(step_T: Any, value_T: Floats, bins: int = _MAX_BINS) -> tuple[Floats, Floats]:
    """Returns means over bins of consecutive steps: mean step [B], mean finite value [B]."""
    parts = np.array_split(np.arange(len(step_T)), min(bins, len(step_T)))
    step_B = np.array([step_T[part].mean() for part in parts])
    value_B = np.array([finite_mean(value_T[part], axis=0) for part in parts])
    # the line spans the whole run, although the centres of the outer bins do not
    step_B[0], step_B[-1] = step_T[0], step_T[-1]
    return step_B, value_B


def _replay_bands(history: History) -> tuple[Floats, dict[str, str], Floats]:
    """Returns mean steps, and colours by label and shares of the bands, from the lowest up.

    Bands are the replay sources, or the paper's categories of them; the smallest ones are merged.
    """
    steady = len(history.step_T) * history.batch_size // _BLOCKS_PER_BIN
    bins = min(max(_MIN_BINS, min(steady, _MAX_BINS)), len(history.first_B))
    first_B = np.array([part[0] for part in np.array_split(history.first_B, bins)])
    rows = [*itertools.pairwise([*first_B, len(history.step_T)])]
    step_B = np.array([history.step_T[slice(*ends)].mean() for ends in rows])
    step_B[0], step_B[-1] = history.step_T[0], history.step_T[-1]
    joined = np.searchsorted(history.first_B, first_B)
    share_BO = np.add.reduceat(history.chosen_BO, joined, axis=0) / history.batch_size
    share_BO /= np.diff(rows)
    bands: dict[str, Any] = {}
    for i in np.flatnonzero(history.is_replay_O):
        name = category_of(history.source_names[i]) or history.source_names[i]
        bands[name] = bands.get(name, 0.0) + share_BO[:, i]
    # colours follow the order of sources in the store, and the smallest bands are merged
    place = {name: i for i, name in enumerate(n for n in bands if bands[n].sum() > 0)}
    by_size = sorted(place, key=lambda name: -bands[name].sum())
    own = by_size if len(by_size) <= NUM_SOURCES else by_size[: NUM_SOURCES - 1]
    rest = by_size[len(own) :]
    order = sorted(own, key=lambda name: place[name])
    fixed = paper()["categories"]
    roles = [category_role(n) if n in fixed else f"source-{order.index(n)}" for n in own]
    columns, names = [bands[name] for name in own], [*own]
    if rest:
        names.append(f"{len(rest)} others")
        roles.append("source-rest")
        columns.append(np.sum([bands[name] for name in rest], axis=0))
    colours = dict(zip(shortened(names), map(light, roles), strict=True))
    return step_B, colours, np.array(columns).T
