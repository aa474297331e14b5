"""`[ARM_]l2_base_<weight>`: the loss has weight / 2 x the squared distance from the base's weights.

This is L2-SP (Li et al. 2018). The distance is that of the weights that the model computes with.
Its gradient is added to that of the whole batch, before gradients are clipped, and costs no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_rod.alternatives import read_name
from nemo_rod.alternatives.base_weights import BaseWeights
from nemo_rod.config import Config
from nemo_rod.selection.arrays import Mask
from nemo_rod.terms import Term


def arm(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant that a name means; None for other names."""
    if (found := read_name(name, "l2_base")) is None:
        return None
    of, weight = found
    return {"of": of, "train": {"terms": {"l2_base": weight}}}


class L2Base(Term):
    """The term of a loss."""

    def __init__(self, weight: float, provider: Any) -> None:
        self.weight, self.base = weight, BaseWeights(provider)

    def around(self, schedule: Callable, is_replay: Mask) -> Callable:
        """Returns a schedule that adds the term's gradient once the batch's is complete."""

        def with_term(**options: Any) -> Any:
            result = schedule(**options)
            for chunk, base in self.base.beside(options["model"]):
                for name, weight in chunk.named_parameters():
                    if weight.requires_grad:
                        away = weight.detach().float() - base[name].float()
                        weight.main_grad.add_(away, alpha=self.weight)
            return result

        return with_term
