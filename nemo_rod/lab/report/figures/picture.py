"""A figure of a report with its text on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rod import parts
from nemo_rod.lab.report.figures.drawing import Spec, files_of
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

    One of another package that cannot be drawn has a sentence in its place, and no specification.
    A figure is `(shown) -> Picture | None` for the run and, behind it, runs of other settings; None
    if its data are missing. One that is also registered as `settings_<name>` gets the run alone,
    and again all of several settings, which are drawn below each other behind all other figures.
    """
    made, names = dict[str, Picture](), parts.names("figures")
    for name in names:
        is_of_all = name.startswith("settings_")
        given = shown[:1] if f"settings_{name}" in names else shown
        try:
            picture = parts.load("figures", name)(given) if len(shown) > is_of_all else None
            if picture is not None and is_of_all:
                title = f"Settings: {picture.title[:1].lower()}{picture.title[1:]}"
                picture = replace(picture, title=title, order=picture.order + 500)
            if picture is not None and name in parts.other_parts("figures"):  # as the page needs it
                picture = replace(picture, order=float(picture.order))
                any([len(data) == 0 for _, data in files_of(name, picture.figure)])
        except parts.FAILURES as error:
            if name in parts.beside("figures"):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            sentence = f"The registered figure '{name}' cannot be drawn ({reason[:300]})"
            cure = "correct the package that registers it."
            picture = Picture((), f"Figure {name}", f"{sentence}: {cure}")
        made |= {name: picture} if picture is not None else {}
    return dict(sorted(made.items(), key=lambda item: item[1].order))


def refuse_undrawn(results: Mapping[str, Any]) -> None:
    """Raises a RuntimeError if figures of a page that was made could not be drawn."""
    if sentences := results.get("undrawn"):
        raise RuntimeError(f"The report is made, but for this: {' '.join(sentences)}")
