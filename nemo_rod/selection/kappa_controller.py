"""A controller for kappa: it raises the weight of replay while there is too little, else lowers it.

The paper fixes kappa at 1 and leaves its choice open (section on limitations). Here it tracks a
target, either the share of replay in a batch or the forgetting of held-out replay text:

    ln kappa  <-  ln kappa + gain * error,      error = 1 - share/target or forgetting/target - 1,
                                                from -1 to 1

after every step (share), or after every validation (forgetting). The controller is stateless: to
resume, it needs only the last kappa and the quantity that resulted, both in the run's metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rod.selection.forgetting import validation_forgetting

Quantity = Literal["share", "forgetting"]
RANGE = 64.0  # kappa stays within this factor of its initial value


@dataclass(frozen=True)
class Steering:
    """The target that kappa tracks, and how fast.

    Attributes:
        quantity: "share" of replay in a batch, or "forgetting" of held-out replay, in nats.
        target: Target value of that quantity.
        gain: Change of ln kappa for an error as large as the target.
        start: Value of kappa at the first step.
    """

    quantity: Quantity
    target: float
    gain: float
    start: float

    def next_kappa(self, kappa: float, found: float | None) -> float:
        """Returns the kappa that follows a step's, given the quantity found after it, if any."""
        if found is None:
            return kappa
        above = min(1.0, found / self.target - 1)
        error = above if self.quantity == "forgetting" else -above
        moved = kappa * math.exp(self.gain * error)
        return min(max(moved, self.start / RANGE), self.start * RANGE)

    def resumed(self, rows: list[dict[str, Any]], base: Mapping[str, float]) -> float:
        """Returns kappa for the step after those with these metrics; see `found` for `base`."""
        if not rows:
            return self.start
        return self.next_kappa(rows[-1]["rod/kappa"], self.found(rows[-1], base))

    def found(self, row: Mapping[str, Any], base: Mapping[str, float]) -> float | None:
        """Returns the quantity from one step's metrics; None if they lack it.

        Forgetting is over the held-out losses of the base per replay source. It weighs sources
        equally, as the paper's breadth-oriented diagnostic does.
        """
        if self.quantity == "share":
            share: float = row["rod/replay_share"]
            return share
        losses = held_out_replay(row)
        return validation_forgetting(losses, base) if losses else None


def held_out_replay(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The losses `validation/replay/<source>/loss` by source; empty if no validation took place."""
    prefix, suffix = "validation/replay/", "/loss"
    return {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in metrics.items()
        if key.startswith(prefix)
    }
