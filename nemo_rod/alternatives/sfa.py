"""`[ARM_]sfa_<steps>`: every so many steps, and at the end, the weights' mean with the base's.

This is sequential fine-tuning with averaging (Kleiman et al. 2025): a merge at a half, from which
training goes on. Moments of the optimizer stay. It costs no pass.
"""

from __future__ import annotations

from typing import Any

from nemo_rod.alternatives import read_name
from nemo_rod.alternatives.base_weights import BaseWeights
from nemo_rod.config import Config
from nemo_rod.terms import Term


def arm(config: Config, name: str) -> dict[str, Any] | None:
    """Returns the variant that a name means; None for other names."""
    if (found := read_name(name, "sfa")) is None:
        return None
    of, every = found
    _refuse_optimizer(config.train.precision_aware_optimizer)
    return {"of": of, "train": {"terms": {"sfa": every}}}


def _refuse_optimizer(precision_aware: bool) -> None:
    if precision_aware:
        raise ValueError(
            "train.precision_aware_optimizer=true does not work with sfa, as its weights cannot be "
            "set from those of the model: leave it out, or take that arm out."
        )


class SFA(Term):
    """The mean with the base's weights, in the dtype of the model."""

    def __init__(self, weight: float, provider: Any) -> None:
        self.every, self.base = weight, BaseWeights(provider)

    def updated(self, model: list, optimizer: Any, state: Any) -> None:
        """Averages, if it is time."""
        done = state.train_state.step + 1
        if done % self.every and done != state.cfg.train.train_iters:
            return
        _refuse_optimizer(optimizer.config.use_precision_aware_optimizer)
        # a parameter that replicas have yet to gather comes from the one that owns it
        for chunk, base in self.base.beside(model):
            for name, weight in chunk.named_parameters():
                weight.data.lerp_(base[name], 0.5)
        optimizer.reload_model_params()
