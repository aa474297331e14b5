"""Losses of blocks under a Hugging Face causal model: a forward-only pass, split over replicas.

Shape suffixes: C = blocks, B = blocks of one pass, S = their scored tokens, T = S - 1 targets,
H = hidden size, s = positions of a slice, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from nemo_rod.config import MAX_LOGITS_BYTES
from nemo_rod.corpus.store import BlockStore
from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.dealing import scoring_passes

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Returned at the last position, which has no target; float16 and bfloat16 represent it exactly.
_MARK = 1024.0
T = TypeVar("T")


class TorchScorer:
    """Scores blocks of a store with a causal language model of Hugging Face.

    The model may be wrapped in `DistributedDataParallel` or sharded by FSDP2 (`fully_shard`). Its
    weights are read when `losses` is called, and its mode (training or evaluation) is kept.

    Args:
        model: the model.
        store: the store that holds the blocks.
        micro_batch_size: blocks in one forward pass of one replica.
        length: leading tokens of a block that are scored; None for all, S.
        group: process group of the replicas; by default all processes, if there are several.

    Attributes:
        precision: arithmetic of the pass as manifests of references have it, such as "bf16"; ""
            before the first pass. "bf16 over fp32" is autocast over weights in fp32.

    Raises:
        ValueError: the model has no output layer, or fewer tokens than the store.

    Example:
        >>> scorer = TorchScorer(model, BlockStore("held_out"), micro_batch_size=4)
        >>> scorer.losses(np.arange(8)).mean()  # nats per token
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: BlockStore,
        *,
        micro_batch_size: int,
        length: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Scoring needs none of the hooks of DDP, which would broadcast buffers.
        self.model: Any = model.module if isinstance(model, DistributedDataParallel) else model
        self.model = getattr(self.model, "_orig_mod", self.model)  # of torch.compile
        self.store, self.micro_batch_size, self.group = store, micro_batch_size, group
        self.length = length or store.block_size
        several = dist.is_available() and dist.is_initialized()
        self.replicas = dist.get_world_size(group) if several else 1
        self.rank = dist.get_rank(group) if several else 0
        self.precision = ""
        self._in_slices = True
        self._head: Any = getattr(self.model, "get_output_embeddings", lambda: None)()
        if self._head is None:
            raise ValueError(
                f"{type(self.model).__name__} has no get_output_embeddings(), so its output layer "
                "is unknown: give a causal language model of Hugging Face transformers."
            )
        vocabulary = self.model.config.get_text_config().vocab_size
        if vocabulary < store.vocab_size:
            raise ValueError(
                f"{type(self.model).__name__} has {vocabulary} tokens, but the blocks in "
                f"{store.root} have {store.vocab_size}: prepare them with the model's tokenizer."
            )

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def losses(self, block_ids: Ids) -> Nats:
        """Returns the losses of blocks under the current weights. Collective over the replicas.

        Args:
            block_ids: ids of the blocks, int64 `[C]`, the same on every rank.

        Returns:
            Mean loss of the next-token targets of the first `length` tokens of each block (paper,
            Eq. "sequence loss"), nats per token, float32 `[C]`, bit-identical on every rank.

        Example:
            >>> scorer.losses(np.array([3, 1]))
            array([2.31, 2.87], dtype=float32)
        """
        # All replicas run equally many passes, which FSDP2 requires: the excess is padding.
        size, passes = scoring_passes(
            len(block_ids),
            micro_batch_size=self.micro_batch_size,
            replicas=self.replicas,
            share=self.length / self.store.block_size,
        )
        padded = np.resize(block_ids, (self.replicas, passes, size))
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                parts = [self._mean_losses(ids) for ids in padded[self.rank]]
        finally:
            for module in in_training:
                module.training = True
            # Under autocast, training would otherwise reuse casts of weights without gradients.
            torch.clear_autocast_cache()
        loss = torch.cat(parts)
        if self.replicas > 1:
            own, loss = loss, loss.new_empty(self.replicas * len(loss))
            dist.all_gather_into_tensor(loss, own, group=self.group)
        return loss[: len(block_ids)].cpu().numpy()

    def from_first(self, function: Callable[[], T]) -> T:
        """Calls a function on the first rank and returns its result on every rank. Collective.

        Raises:
            ValueError: the function raised ValueError or OSError.
        """
        sent: list[Any] = [None, None]
        if self.rank == 0:
            try:
                sent[0] = function()
            except (ValueError, OSError) as error:
                sent[1] = str(error)
        if self.replicas > 1:
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
        if sent[1] is not None:
            raise ValueError(sent[1])
        return sent[0]

    def gathered(self, own: str) -> list[str]:
        """Returns the text of every rank, which must be short. Collective."""
        every: list[Any] = [own] * self.replicas
        if self.replicas > 1:
            dist.all_gather_object(every, own, group=self.group)
        return every

    def _mean_losses(self, block_ids: Ids) -> torch.Tensor:
        """Returns the losses of the blocks of one pass, float32 `[B]`."""
        tokens = self.store.tokens(block_ids)[:, : self.length + 1]  # the last one is a target
        tokens_BS = torch.from_numpy(tokens).to(self.device).long()
        if self._in_slices:
            output_BS = self._forward_in_slices(tokens_BS)
            # Models with a soft cap or a scale on their logits have applied it to the losses.
            self._in_slices = bool((output_BS[:, -1] == _MARK).all())
        if self._in_slices:
            loss_BT = output_BS[:, :-1]
        else:
            logits = self.model(input_ids=tokens_BS, use_cache=False).logits
            loss_BT = self._by_slices(logits[:, :-1], tokens_BS[:, 1:])
        return loss_BT.double().mean(dim=1).float()

    def _forward_in_slices(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns the token losses and, at the last position, a mark, float32 `[B, S]`.

        The output layer itself computes them, so that the logits of a whole block never exist,
        while FSDP2 has its weights gathered: the model passes them on in place of logits.
        """
        head, targets_BT = self._head, tokens_BS[:, 1:]
        own, forward = vars(head).get("forward"), head.forward

        def losses(hidden_BSH: torch.Tensor) -> torch.Tensor:
            loss_BT = self._by_slices(hidden_BSH[:, :-1], targets_BT, forward)
            return torch.nn.functional.pad(loss_BT, (0, 1), value=_MARK)[..., None]

        head.forward = losses
        try:
            return self.model(input_ids=tokens_BS, use_cache=False).logits.squeeze(-1)
        finally:
            if own is None:
                del head.forward
            else:
                head.forward = own

    def _by_slices(
        self, values: torch.Tensor, targets_BT: torch.Tensor, to_logits: Any = lambda logits: logits
    ) -> torch.Tensor:
        """Returns token losses `[B, T]` from logits, or from the hidden states that give them."""
        vocabulary = self.model.config.get_text_config().vocab_size
        length = max(1, MAX_LOGITS_BYTES // (4 * len(targets_BT) * vocabulary))
        parts = []
        for values_s, targets_Bs in zip(
            values.split(length, dim=1), targets_BT.split(length, dim=1), strict=True
        ):
            logits_BsV = to_logits(values_s)
            weights = _DTYPES.get(getattr(self._head, "weight", logits_BsV).dtype, "other")
            name = _DTYPES.get(logits_BsV.dtype, "other")
            self.precision = self.precision or (
                name if name == weights else f"{name} over {weights}"
            )
            flat = cross_entropy(
                logits_BsV.float().flatten(0, 1), targets_Bs.flatten(), reduction="none"
            )
            parts.append(flat.view(targets_Bs.shape))
            del logits_BsV  # before the next slice is made
        return torch.cat(parts, dim=1)
