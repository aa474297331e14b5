"""Block losses from training steps, for policies that observe them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from nemo_rod.megatron.scoring.scorer import on_every_rank
from nemo_rod.megatron.scoring.scoring_pass import loss_sums, mean_losses


class TrainingLosses:
    """Collects the loss of each block from the forward pass of a training step.

    The trainer's forward step returns the model's output and the loss function, whose first
    argument is the loss mask, as in Megatron's trainers. `groups` are Megatron's process groups.
    """

    def __init__(self, forward_step: Callable[..., tuple], groups: Any) -> None:
        self._forward_step, self._groups = forward_step, groups
        self._sums: list[torch.Tensor] = []

    def forward_step(self, *args: Any, **kwargs: Any) -> tuple:
        """Runs the trainer's forward step and collects its block losses."""
        output, loss_function = self._forward_step(*args, **kwargs)

        def capture_losses(mask: torch.Tensor, output: Any, **options: Any) -> Any:
            with torch.no_grad():
                self._sums.append(loss_sums(mask, output, cp=self._groups.cp))
            return loss_function(output, **options)

        return output, partial(capture_losses, loss_function.args[0])

    def gather(self, num_blocks: int, micro_batch_size: int) -> np.ndarray:
        """Gathers the losses of a batch's K blocks, dealt to replicas in turn. Collective.

        Returns:
            Losses of whole blocks, in the order of the batch, nats per token, float32 `[K]`.
        """
        own, replicas = mean_losses(self._sums, self._groups.cp), self._groups.dp.size()
        gathered = on_every_rank(own, num_blocks // replicas, 1, self._groups)
        by_replica = gathered.view(replicas, -1, micro_batch_size)
        return by_replica.transpose(0, 1).reshape(num_blocks).cpu().numpy()


def refuse_dropout(config: Any) -> None:
    """Refuses dropout, under which training losses exceed those of a scoring pass.

    Raises:
        ValueError: the model is trained with dropout.
    """
    for name in ("hidden_dropout", "attention_dropout"):
        if (rate := getattr(config, name, 0.0)) > 0:
            raise ValueError(
                f"The model has {name}={rate}, which raises the training losses that this arm "
                "chooses by: remove dropout from the base's config.json, or take an arm that "
                "scores its candidates, such as rod."
            )
