"""A figure of a report with its text on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_rod import parts
from nemo_rod.lab.report.figures.drawing import Spec
from nemo_rod.lab.report.results import RunResults


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


def pictures_of(shown: Sequence[RunResults]) -> dict[str, Picture]:
    """Returns the pictures of all registered figures, by name, in the order of the page.

    A figure is `(shown) -> Picture | None` for the run and, behind it, runs of other settings; None
    if its data are missing. One that is also registered as `settings_<name>` gets the run alone,
    and again all of several settings, which are drawn below each other behind all other figures.
    """
    made, names = dict[str, Picture](), parts.names("figures")
    for name in names:
        is_of_all = name.startswith("settings_")
        given = shown[:1] if f"settings_{name}" in names else shown
        picture = parts.load("figures", name)(given) if len(shown) > is_of_all else None
        if picture is not None and is_of_all:
            title = f"Settings: {picture.title[:1].lower()}{picture.title[1:]}"
            picture = replace(picture, title=title, order=picture.order + 500)
        made |= {name: picture} if picture is not None else {}
    return dict(sorted(made.items(), key=lambda item: item[1].order))
