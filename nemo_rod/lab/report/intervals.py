"""Intervals of losses and forgetting over the choice of held-out blocks.

The held-out blocks of every source are drawn again with replacement (a bootstrap); all arms have
the same draws, so that their differences have the blocks' common part removed. The intervals say
how far results depend on the blocks, and not how far runs with other seeds differ.

Shape suffixes: B = draws, N = held-out blocks of a source, A = arms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nemo_rod.lab.report.run_files import Losses, Run
from nemo_rod.roles import ROLES

DRAWS, SEED = 1000, 0
PERCENTILES = (5, 95)


class Draws(NamedTuple):
    """Losses of arms on draws of the held-out blocks."""

    names: list[str]  # arms whose blocks can be compared
    # nats per token, float64 [B, A], by key of the results: adaptation loss, and forgetting with
    # improvements counted and not; of a role without held-out blocks, or a base, there is none
    values: dict[str, Losses]


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
            parts = {"adapt_loss": mean_BA}
        elif "base" in names:
            rise_BA = mean_BA - mean_BA[:, [names.index("base")]]
            parts = {"signed_forgetting": rise_BA, "val_forgetting": np.maximum(0, rise_BA)}
        else:
            continue
        total |= {key: total.get(key, 0) + weight * part for key, part in parts.items()}
    return Draws(names, total)


def intervals_of(drawn: Draws) -> dict[str, Any]:
    """Returns `adapt_loss` and `val_forgetting` as [low, high] of every arm, in nats.

    Omitted: the arms that `draws_of` leaves out.
    """
    ends = {
        key: np.percentile(drawn.values[key], PERCENTILES, axis=0).T.tolist()
        for key in ("adapt_loss", "val_forgetting")
        if key in drawn.values
    }
    return {
        name: {key: by_arm[place] for key, by_arm in ends.items()}
        for place, name in enumerate(drawn.names)
    }
