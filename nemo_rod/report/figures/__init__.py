"""The figures of a report, as pure functions from results to matplotlib figures.

Each takes a `Canvas` (desktop or phone) and returns a figure, or None if its arms were not run.
Nothing here reads or writes results.
"""

from __future__ import annotations

from nemo_rod.report.figures.ablations import (
    budgets,
    components,
    pool_size,
    transfer,
    weighting,
)
from nemo_rod.report.figures.canvas import Canvas, inline_svg, save
from nemo_rod.report.figures.during_training import Training, replay_share, scores
from nemo_rod.report.figures.frontier import frontier, settings_frontier
from nemo_rod.report.figures.progress_curves import under_way
from nemo_rod.report.figures.rows import capabilities, seeds
from nemo_rod.report.figures.sources import forgetting_profile, sampling_ratio

__all__ = [
    "Canvas",
    "Training",
    "budgets",
    "capabilities",
    "components",
    "forgetting_profile",
    "frontier",
    "inline_svg",
    "pool_size",
    "replay_share",
    "sampling_ratio",
    "save",
    "scores",
    "seeds",
    "settings_frontier",
    "transfer",
    "under_way",
    "weighting",
]
