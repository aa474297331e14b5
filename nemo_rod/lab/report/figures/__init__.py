"""The figures of a report, as pure functions from results to matplotlib figures.

Each takes a `Canvas` (desktop or phone) and returns a figure, or None if its arms were not run.
Nothing here reads or writes results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from nemo_rod.lab.report.figures import ablations, during_training, frontier, rows, sources
from nemo_rod.lab.report.figures.canvas import Canvas, inline_svg
from nemo_rod.lab.report.figures.progress_curves import under_way
from nemo_rod.lab.report.run_files import Shown
from nemo_rod.lab.report.under_way import Part

Draw = Callable[[Any, Canvas], Figure | None]
_OF_RUN: dict[str, Draw] = {
    "frontier": frontier.frontier,
    "capabilities": rows.capabilities,
    "components": ablations.components,
    "pool_size": ablations.pool_size,
    "weighting": ablations.weighting,
    "budgets": ablations.budgets,
    "transfer": ablations.transfer,
    "seeds": rows.seeds,
}
_OF_SETTINGS: dict[str, Draw] = {
    "frontier": frontier.settings_frontier,
    "replay_share": during_training.replay_share,
    "scores": during_training.scores,
    "forgetting_profile": sources.forgetting_profile,
    "sampling_ratio": sources.sampling_ratio,
}
# Titles, captions and order are the page's (`page.html`).
FIGURES = (
    *{**_OF_RUN, **_OF_SETTINGS, **{f"settings_{name}": None for name in _OF_SETTINGS}},
    "under_way",
)


def draw(
    name: str, shown: Sequence[Shown], parts: Sequence[Part]
) -> tuple[Figure, tuple[str, str]] | None:
    """Returns a figure by its name, and its SVG for desktops and for phones.

    It is drawn twice: one width scaled to a phone is illegible there, and scrolled sideways it
    hides the labels, which end the lines on the right.
    """
    desktop = _draw(name, shown, parts, Canvas())
    phone = _draw(name, shown, parts, Canvas(narrow=True))
    if desktop is None or phone is None:
        return None
    return desktop, (inline_svg(desktop, f"{name}-wide"), inline_svg(phone, f"{name}-narrow"))


def _draw(
    name: str, shown: Sequence[Shown], parts: Sequence[Part], canvas: Canvas
) -> Figure | None:
    """Returns a figure of the first run, or of it and all other settings."""
    if name == "under_way":
        return under_way(parts, canvas)
    if name in _OF_RUN:
        return _OF_RUN[name](shown[0][1], canvas)
    if not name.startswith("settings_"):
        shown = shown[:1]
    elif len(shown) < 2:
        return None
    name = name.removeprefix("settings_")
    if name in ("replay_share", "scores"):
        return _OF_SETTINGS[name](during_training.runs_of_rod(shown), canvas)
    return _OF_SETTINGS[name]([results for _, results in shown], canvas)
