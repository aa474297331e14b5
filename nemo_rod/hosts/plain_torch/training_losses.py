"""Losses of the blocks that a loop trains on, from its own forward passes.

Shape suffixes: K = blocks of a step, B = blocks of a batch, S = tokens per block, T = targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rod.hosts.plain_torch.scorer import TorchScorer
from nemo_rod.selection.arrays import Nats
from nemo_rod.selection.dealing import deal


class TrainingLosses:
    """Collects the losses of a step's blocks whenever the model is called in training.

    The replicas exchange them in the last forward pass of a step, which all of them run, so that
    one rank alone may end the step later.

    Args:
        scorer: scores blocks with the same model.
        num_batches: batches of one step in this process.
    """

    def __init__(self, scorer: TorchScorer, num_batches: int) -> None:
        self._scorer, self._num_batches = scorer, num_batches
        self._own: list[torch.Tensor] = []
        self._loss_K: Nats | None = None
        scorer.model.register_forward_hook(self._collect, with_kwargs=True)

    def take(self) -> Nats | None:
        """Returns the losses of a step, nats per token, float32 [K], once; None if some lack."""
        loss_K, self._own, self._loss_K = self._loss_K, [], None
        return loss_K

    def _collect(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (torch.is_grad_enabled() and kwargs.get("labels") is not None):  # a scoring pass
            return
        tokens_BS, logits = kwargs["input_ids"], getattr(output, "logits", None)
        if logits is None or logits.shape[:2] != tokens_BS.shape:
            raise ValueError(
                f"{type(model).__name__} returns no logits in training, from which a policy that "
                "learns from the training losses takes them: turn off a fused loss, or choose "
                "another policy."
            )
        with torch.no_grad():
            loss_BT = self._scorer.token_losses(logits[:, :-1], tokens_BS[:, 1:])
            self._own.append(loss_BT.double().mean(dim=1).float())
        if len(self._own) == self._num_batches:
            self._loss_K = self._gather()

    def _gather(self) -> Nats:
        """Returns the losses in the order of the batch. Collective over the replicas."""
        scorer, own = self._scorer, torch.cat(self._own)
        count = len(own) * scorer.replicas
        gathered = own
        if scorer.replicas > 1:
            gathered = own.new_empty(count)
            dist.all_gather_into_tensor(gathered, own, group=scorer.group)
        size = len(self._own[0])
        places = deal(np.arange(count), micro_batch_size=size, replicas=scorer.replicas)
        loss_K = np.empty(count, dtype=np.float32)
        loss_K[np.concatenate(places)] = gathered.cpu().numpy()
        return loss_K
