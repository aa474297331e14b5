"""A figure of a report with its text on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rod import parts
from nemo_rod.lab.report.figures.drawing import Spec
from nemo_rod.lab.report.results import Shown


@dataclass(frozen=True)
class Picture:
    """A figure with its text on the page.

    Attributes:
        figure: a Vega-Lite specification with its data, or several below each other. One of a
            single view or of facets is as wide as the page.
        title: its heading.
        caption: what it shows; F_val is typeset.
        order: place among the figures of the page, ascending; those below 100 are above the table
            of arms, and those below 200 above the curves.
    """

    figure: Spec | Sequence[Spec]
    title: str
    caption: str = ""
    order: float = 900


Figure = Callable[[Sequence[Shown]], Picture | None]


def pictures_of(shown: Sequence[Shown]) -> dict[str, Picture]:
    """Returns the pictures of all registered figures, by name, in the order of the page.

    A figure is `(shown) -> Picture | None` for the run and, behind it, runs of other settings; None
    if its data are missing. Those named `settings_*` are of all settings side by side, if there are
    several; others of ours are of the first.
    """
    made = {name: parts.load("figures", name)(shown) for name in parts.names("figures")}
    there = {name: picture for name, picture in made.items() if picture is not None}
    return dict(sorted(there.items(), key=lambda item: item[1].order))
