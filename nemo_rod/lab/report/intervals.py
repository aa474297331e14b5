"""Intervals of losses, forgetting and gaps to fixed replay over the choice of held-out blocks.

The held-out blocks of every source are drawn again with replacement (a bootstrap); all arms have
the same draws, so that their differences have the blocks' common part removed. The intervals say
how far results depend on the blocks, and not how far runs with other seeds differ.

Shape suffixes: B = draws, N = held-out blocks of a source, A = arms.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_rod.lab.report.chord import Chord, ChordPoint
from nemo_rod.lab.report.run_files import Losses, Run
from nemo_rod.roles import ROLES

DRAWS, SEED = 1000, 0
PERCENTILES = (5, 95)


def intervals_of(run: Run, on_chord: list[str], *, draws: int = DRAWS) -> dict[str, Any]:
    """Returns `adapt_loss`, `val_forgetting` and `gap` as [low, high] of every arm, in nats.

    A value that some draw leaves undefined has no interval, and an arm no entry if the losses of
    its blocks were not kept or are of other blocks than those of the first arm.
    """
    sizes = {
        name: [(r, s, len(n)) for r in ROLES for s, n in arm.block_losses.get(r, {}).items()]
        for name, arm in run.arms.items()
        if arm.block_losses
    }
    names = [name for name in sizes if sizes[name] == sizes[next(iter(sizes))]]
    rng, total_BA = np.random.default_rng(SEED), dict[str, Losses]()
    for role, source, size in sizes[names[0]] if names else []:
        loss_NA = np.stack([run.arms[name].block_losses[role][source] for name in names], axis=1)
        mean_BA = rng.multinomial(size, np.full(size, 1 / size), draws) @ loss_NA / size
        if role == "replay":  # F_val: the rise over the base
            if "base" not in names:
                continue
            mean_BA = np.maximum(0, mean_BA - mean_BA[:, [names.index("base")]])
        counts = run.weights[role]
        weight = counts[source] / sum(counts[s] for r, s, _ in sizes[names[0]] if r == role)
        total_BA[role] = total_BA.get(role, 0) + weight * mean_BA
    measures = {"adapt_loss": total_BA.get("adaptation"), "val_forgetting": total_BA.get("replay")}
    if len(total_BA) == len(ROLES) and set(on_chord) <= set(names):
        # to the draw's own chord; NaN on it and without one
        measures["gap"] = gap_BA = np.full_like(total_BA["adaptation"], np.nan)
        for loss_A, forgetting_A, gap_A in zip(
            *(total_BA[role] for role in ROLES), gap_BA, strict=True
        ):
            points = dict(zip(names, map(ChordPoint, names, forgetting_A, loss_A), strict=True))
            chord = Chord.through([points[name] for name in on_chord])
            for place, name in enumerate(names):
                value = chord.at(float(forgetting_A[place])) if chord else None
                if value is not None and name not in on_chord:
                    gap_A[place] = loss_A[place] - value.adapt_loss
    return {
        name: {
            measure: np.percentile(value_BA[:, place], PERCENTILES).tolist()
            for measure, value_BA in measures.items()
            if value_BA is not None and np.isfinite(value_BA[:, place]).all()
        }
        for place, name in enumerate(names)
    }
