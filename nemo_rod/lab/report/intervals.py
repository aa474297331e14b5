"""Intervals of losses, forgetting and gains over fixed replay over the choice of held-out blocks.

The held-out blocks of every source are drawn again with replacement (a bootstrap); all arms have
the same draws, so that their differences have the blocks' common part removed. The intervals say
how far results depend on the blocks, and not how far runs with other seeds differ.

Shape suffixes: B = draws, N = held-out blocks of a source, A = arms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rod.lab.report.chord import Chord, ChordPoint
from nemo_rod.lab.report.run_files import Losses, Run
from nemo_rod.roles import ROLES

DRAWS, SEED = 1000, 0
PERCENTILES = (5, 95)


@dataclass(frozen=True)
class Draws:
    """Losses of arms on draws of the held-out blocks, nats per token, float64 [B, A].

    None where a role has no held-out blocks, or, for forgetting, where the base is missing.
    """

    names: list[str]  # arms whose blocks can be compared
    adapt_loss: Losses | None
    forgetting: Losses | None  # F_val: an improvement of a source counts as zero
    signed_forgetting: Losses | None  # improvements count, too


def draws_of(run: Run, *, draws: int = DRAWS) -> Draws:
    """Returns the losses of a run's arms on draws of the held-out blocks.

    An arm is left out if the losses of its blocks were not kept, or are of other blocks than those
    of the first arm.
    """
    sizes = {
        name: [(r, s, len(n)) for r in ROLES for s, n in arm.block_losses.get(r, {}).items()]
        for name, arm in run.arms.items()
        if arm.block_losses
    }
    names = [name for name in sizes if sizes[name] == sizes[next(iter(sizes))]]
    rng, total = np.random.default_rng(SEED), dict[str, Losses]()
    for role, source, size in sizes[names[0]] if names else []:
        loss_NA = np.stack([run.arms[name].block_losses[role][source] for name in names], axis=1)
        mean_BA = rng.multinomial(size, np.full(size, 1 / size), draws) @ loss_NA / size
        counts = run.weights[role]
        weight = counts[source] / sum(counts[s] for r, s, _ in sizes[names[0]] if r == role)
        if role == "adaptation":
            total["adapt_loss"] = total.get("adapt_loss", 0) + weight * mean_BA
        elif "base" in names:  # the rise over the base
            rise_BA = mean_BA - mean_BA[:, [names.index("base")]]
            total["signed"] = total.get("signed", 0) + weight * rise_BA
            total["capped"] = total.get("capped", 0) + weight * np.maximum(0, rise_BA)
    return Draws(names, total.get("adapt_loss"), total.get("capped"), total.get("signed"))


def intervals_of(run: Run, on_chord: list[str], *, draws: int = DRAWS) -> dict[str, Any]:
    """Returns `adapt_loss`, `val_forgetting` and `gain` as [low, high] of every arm, in nats.

    Omitted: values undefined in any draw, and the arms that `draws_of` leaves out.
    """
    drawn = draws_of(run, draws=draws)
    names = drawn.names
    measures = {"adapt_loss": drawn.adapt_loss, "val_forgetting": drawn.forgetting}
    loss_BA, forgetting_BA = measures.values()
    if loss_BA is not None and forgetting_BA is not None and set(on_chord) <= set(names):
        # over the draw's own chord; NaN on it and without one
        measures["gain"] = gain_BA = np.full_like(loss_BA, np.nan)
        for loss_A, forgetting_A, gain_A in zip(loss_BA, forgetting_BA, gain_BA, strict=True):
            points = dict(zip(names, map(ChordPoint, names, forgetting_A, loss_A), strict=True))
            chord = Chord.through([points[name] for name in on_chord])
            for place, name in enumerate(names):
                value = chord.at(float(forgetting_A[place])) if chord else None
                if value is not None and name not in on_chord:
                    gain_A[place] = value.adapt_loss - loss_A[place]
    return {
        name: {
            measure: np.percentile(value_BA[:, place], PERCENTILES).tolist()
            for measure, value_BA in measures.items()
            if value_BA is not None and np.isfinite(value_BA[:, place]).all()
        }
        for place, name in enumerate(names)
    }
