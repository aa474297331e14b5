"""What training has beside the loss of the next token, by registered names (`train.terms`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_rod import parts
from nemo_rod.selection.arrays import Mask


class Term:
    """A term of a loss, or another change of training; made as `(weight, provider)`.

    `provider` is Megatron-Bridge's of the model. A hook that it registers there runs when the model
    has the base's weights, before those of a checkpoint are loaded.
    """

    passes = 0.0  # forward passes over every replay block, by a model beside that in training

    def around(self, schedule: Callable, is_replay: Mask) -> Callable:
        """Returns a forward-backward function with the term.

        `is_replay` has the blocks of this replica, bool [blocks], in the order of micro-batches.
        """
        return schedule

    def updated(self, model: list, optimizer: Any, state: Any) -> None:
        """Called after every update; the step of the trainer's global state is still its own."""


def make_terms(weights: dict[str, float], provider: Any) -> list[Term]:
    """Returns the terms of `train.terms`, which change the model that a provider builds."""
    return [
        parts.load("terms", name, key="train.terms")(weight, provider)
        for name, weight in weights.items()
    ]
