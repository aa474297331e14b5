"""A controller on kappa: more weight to replay while there is too little of it, less after.

The paper keeps kappa at 1 and names its choice as open (section on limitations). Here it follows a
target, either the share of replay in a batch or the forgetting of held-out replay text:

    ln kappa  <-  ln kappa + gain * error,      error = 1 - share/target or forgetting/target - 1,
                                                from -1 to 1

after every step (share), or after every look at held-out text (forgetting). What it needs to go on
is the last kappa and what came of it, which are in the run's metrics; it remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rod.selection.forgetting import validation_forgetting

Quantity = Literal["share", "forgetting"]
RANGE = 64.0  # kappa stays within this factor of where it began


@dataclass(frozen=True)
class Steering:
    """What kappa follows.

    Attributes:
        quantity: "share" of replay in a batch, or "forgetting" of held-out replay, in nats.
        target: of that quantity.
        gain: change of ln kappa for an error as large as the target.
        start: kappa of the first step.
    """

    quantity: Quantity
    target: float
    gain: float
    start: float

    def next_kappa(self, kappa: float, found: float | None) -> float:
        """Returns kappa of the next step.

        Args:
            kappa: of the step that just ended.
            found: the quantity after it; None if it was not looked at.
        """
        if found is None:
            return kappa
        above = min(1.0, found / self.target - 1)
        error = above if self.quantity == "forgetting" else -above
        moved = kappa * math.exp(self.gain * error)
        return min(max(moved, self.start / RANGE), self.start * RANGE)

    def resumed(self, rows: list[dict[str, Any]], base: Mapping[str, float]) -> float:
        """Returns kappa of the step after those that were recorded.

        Args:
            rows: metrics of the steps that are done, in order.
            base: held-out loss of the base per replay source; see `held_out_replay`.
        """
        if not rows:
            return self.start
        return self.next_kappa(rows[-1]["rod/kappa"], self.found(rows[-1], base))

    def found(self, row: Mapping[str, Any], base: Mapping[str, float]) -> float | None:
        """Returns the quantity in one step's metrics; None if they do not have it.

        Forgetting weighs sources alike, as the paper's breadth-oriented diagnostic does.
        """
        if self.quantity == "share":
            share: float = row["rod/replay_share"]
            return share
        losses = held_out_replay(row)
        return validation_forgetting(losses, base) if losses else None


def held_out_replay(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The losses `validation/replay/<source>/loss` of one look, by source; empty without a look."""
    prefix, suffix = "validation/replay/", "/loss"
    return {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in metrics.items()
        if key.startswith(prefix)
    }
