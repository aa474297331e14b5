"""The figures of a report: registered functions from results to a `Picture`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_rod.lab.report.figures import over_steps, plane, sources
from nemo_rod.lab.report.figures.picture import Figure, Picture, pictures_of
from nemo_rod.lab.report.results import Shown

__all__ = ["Picture", "pictures_of"]


def _of_run(draw: Figure) -> Figure:
    """Returns a figure of the first run alone."""
    return lambda shown: draw(shown[:1])


def _of_settings(draw: Figure) -> Figure:
    """Returns a figure of several settings below each other, behind all others."""

    def drawn(shown: Sequence[Shown]) -> Picture | None:
        if len(shown) < 2 or (picture := draw(shown)) is None:
            return None
        title = f"Settings: {picture.title[:1].lower()}{picture.title[1:]}"
        return replace(picture, title=title, order=picture.order + 500)

    return drawn


frontier, settings_frontier = _of_run(plane.frontier), _of_settings(plane.frontier)
replay_share = _of_run(over_steps.replay_share)
settings_replay_share = _of_settings(over_steps.replay_share)
scores, settings_scores = _of_run(over_steps.scores), _of_settings(over_steps.scores)
forgetting_profile = _of_run(sources.forgetting_profile)
settings_forgetting_profile = _of_settings(sources.forgetting_profile)
sampling_ratio = _of_run(sources.sampling_ratio)
settings_sampling_ratio = _of_settings(sources.sampling_ratio)
