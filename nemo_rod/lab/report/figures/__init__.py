"""The figures of a report: registered functions from results to a `Picture`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rod import parts
from nemo_rod.lab.report.figures import during_training, plane, rows, sources
from nemo_rod.lab.report.paper import paper_arms
from nemo_rod.lab.report.results import Results, Shown
from nemo_rod.selection.arms import SWEPT


@dataclass(frozen=True)
class Picture:
    """A figure with its text on the page.

    Attributes:
        figure: a Vega-Lite specification with its data, or a matplotlib figure.
        title: its heading.
        caption: what it shows; F_val is typeset.
        order: place among the figures of the page, ascending; those below 100 are above the table
            of arms, and those below 200 above the curves.
    """

    figure: Any
    title: str
    caption: str = ""
    order: int = 900


def pictures_of(shown: Sequence[Shown]) -> dict[str, Picture]:
    """Returns the pictures of all registered figures, by name, in the order of the page.

    A figure is `(shown) -> Picture | None` for the run and, behind it, runs of other settings; None
    if its data are missing.
    """
    made = {name: parts.load("figures", name)(shown) for name in parts.names("figures")}
    there = {name: picture for name, picture in made.items() if picture is not None}
    return dict(sorted(there.items(), key=lambda item: item[1].order))


@dataclass(frozen=True)
class _Figure:
    """A figure of ours, of the run alone or of all settings side by side."""

    draw: Callable[[Sequence[Shown]], Any]
    title: str
    order: int
    caption: str | Callable[[Results], str]
    num_runs: int | None = 1  # None: all, if there are several

    def __call__(self, shown: Sequence[Shown]) -> Picture | None:
        results = shown[0][1]
        if self.num_runs is None and len(shown) < 2:
            return None
        if (figure := self.draw(shown[: self.num_runs])) is None:
            return None
        text = self.caption if isinstance(self.caption, str) else self.caption(results)
        return Picture(figure, self.title, text, self.order)

    def of_settings(self) -> _Figure:
        """Returns the same of all settings, behind all others."""
        title = f"Settings: {self.title[:1].lower()}{self.title[1:]}"
        return replace(self, title=title, order=self.order + 500, num_runs=None)


def _of_results(draw: Callable[[Results], Any]) -> Callable[[Sequence[Shown]], Any]:
    return lambda shown: draw(shown[0][1])


def _crosses(results: Results) -> str:
    return "Crosses are the paper's own numbers." if paper_arms(results["recipe"]) else ""


def _beside(results: Results) -> str:
    text = "Faint marks and lines are the other seeds. " if results["replicates"] else ""
    return text + _crosses(results)


def _of_frontier(results: Results) -> str:
    text = (
        "Lower left is better. The blue line is the chord: fixed replay at the shares that were "
        "run and, straight in ln F_val as on this axis, between them. The dashed line is RoD's "
        "distance from it at equal forgetting. An F_val of 0 is drawn at half of the least above "
        "it. "
    )
    base = results["arms"].get("base") or {"adapt_loss": None}
    if (loss := base["adapt_loss"]) is not None:
        text += f"The base model ({loss:.3f} nats, no forgetting) is off the picture. "
    if results["intervals"]:
        text += "Thin crosses are 90 % intervals over the held-out blocks, not over seeds. "
    return text + _beside(results)


def _of_profile(results: Results) -> str:
    without = results["profile"].get("rod", {}).get("without") or "the most influential source"
    return (
        "One point per replay source and arm. The dotted diagonal is no replay at all; with a flat "
        "line, the most vulnerable sources are protected most. Broken lines are the fits without "
        f"{without}, whose no-replay forgetting lies farthest from the mean."
    )


frontier = _Figure(_of_results(plane.frontier), "Adaptation against forgetting", 10, _of_frontier)
settings_frontier = replace(frontier, draw=plane.settings_frontier).of_settings()
replay_share = _Figure(
    during_training.replay_share,
    "Replay over training, by source",
    110,
    "Bands are replay sources, or the paper's categories of them; the line is their sum: the "
    "replay share of the trained batch. Dots are means over tenths of the run, in percent. 1× and "
    "2× mark one and two passes over the adaptation blocks, and “annealing” the step from which "
    "the learning rate falls.",
)
settings_replay_share = replay_share.of_settings()
scores = _Figure(
    during_training.scores,
    "Scores of adaptation and replay",
    120,
    "Mean scores of the adaptation candidates (left to learn) and of the replay candidates "
    "(forgotten), and the lowest score of a chosen block; below, the share of replay that follows.",
)
settings_scores = scores.of_settings()
forgetting_profile = _Figure(sources.forgetting_profile, "Protection by source", 210, _of_profile)
settings_forgetting_profile = forgetting_profile.of_settings()
sampling_ratio = _Figure(
    sources.sampling_ratio,
    "Replay by source",
    220,
    "Each source's share of the replay trained on over its share of the replay candidates. RoD "
    "follows the forgetting that is left under replay; a source that is forgotten badly but "
    "recovers from a few blocks needs little replay, which weakens the relation with no-replay "
    "forgetting.",
)
settings_sampling_ratio = sampling_ratio.of_settings()
capabilities = _Figure(
    _of_results(rows.capabilities),
    "Tasks",
    230,
    lambda results: (
        "Accuracy less the base model's, by capability; zero keeps all of it. " + _crosses(results)
    ),
)
components = _Figure(
    _of_results(plane.components),
    "Ablations",
    240,
    "Triangles have RoD's mean share of replay in every batch and choose new blocks and replay at "
    "random or by score. Those that point down repeat RoD's recorded share at every step, overall "
    "or by source, with random blocks: the same amounts at the same steps, without the choice of "
    "blocks.",
)
pool_size = _Figure(
    lambda shown: plane.swept(*shown[0], key=SWEPT["pool_size"]),
    "Number of candidates",
    250,
    "With m candidates per trained block, half of them adaptation. Below m = 2 adaptation "
    "candidates alone cannot fill a batch, which sets a minimum of replay.",
)
weighting = _Figure(
    lambda shown: plane.swept(*shown[0], key=SWEPT["weighting"]),
    "Weight of replay",
    260,
    "Replay scores are weighted by κ, which trades learning against retention; κ is 1 in the "
    "paper.",
)
budgets = _Figure(
    _of_results(plane.budgets),
    "Longer training",
    270,
    "Lines lead from an arm at the common budget to the same arm trained longer or shorter; the "
    "numbers are budgets relative to the common one.",
)
transfer = _Figure(
    _of_results(plane.transfer),
    "Transfer from a smaller model",
    280,
    lambda results: (
        "Arms on a smaller model's recorded curriculum, or with its reference losses, beside RoD "
        "itself. " + _beside(results)
    ),
)
seeds = _Figure(
    _of_results(rows.seeds), "Over seeds", 290, "Every seed, their range and their mean."
)
