"""The figures of a report, as pure functions from results to matplotlib figures.

Each returns a figure, or None if its arms were not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from nemo_rod.lab.report.figures import during_training, plane, rows, sources
from nemo_rod.lab.report.results import Shown

Draw = Callable[[Any], Figure | None]
_SWEPT: dict[str, str] = {
    "pool_size": "multiplier",
    "weighting": "kappa",
}
_OF_RUN: dict[str, Draw | None] = {
    "frontier": plane.frontier,
    "capabilities": rows.capabilities,
    "components": plane.components,
    "pool_size": None,
    "weighting": None,
    "budgets": plane.budgets,
    "transfer": plane.transfer,
    "seeds": rows.seeds,
}
_OF_SETTINGS: dict[str, Draw] = {
    "frontier": plane.settings_frontier,
    "replay_share": during_training.replay_share,
    "scores": during_training.scores,
    "forgetting_profile": sources.forgetting_profile,
    "sampling_ratio": sources.sampling_ratio,
}
# Titles, captions and order are the page's (`page.html`).
FIGURES = (*{**_OF_RUN, **_OF_SETTINGS, **{f"settings_{name}": None for name in _OF_SETTINGS}},)


def draw(name: str, shown: Sequence[Shown]) -> Figure | None:
    """Returns a figure of the first run, or of all settings; None if its data are missing."""
    if name in _SWEPT:
        return plane.swept(*shown[0], key=_SWEPT[name])
    if draw_run := _OF_RUN.get(name):
        return draw_run(shown[0][1])
    if not name.startswith("settings_"):
        shown = shown[:1]
    elif len(shown) < 2:
        return None
    return _OF_SETTINGS[name.removeprefix("settings_")](shown)
