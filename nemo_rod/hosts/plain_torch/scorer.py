"""Losses of blocks under a Hugging Face causal model: a forward-only pass, split over replicas.

Shape suffixes: C = blocks, B = blocks of one pass, S = their scored tokens, T = S - 1 targets,
L = scored lengths, H = hidden size, s = positions of a slice, V = vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from nemo_rod.config import MAX_LOGITS_BYTES
from nemo_rod.corpus.store import BlockStore
from nemo_rod.hosts.job_policy import refuse_if
from nemo_rod.ranks import from_recorder
from nemo_rod.selection.arrays import Ids, Nats
from nemo_rod.selection.dealing import scoring_passes
from nemo_rod.selection.references.folder import precision_name

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
        ValueError: the model is no causal language model in memory, has fewer tokens than the
            store or fewer positions than are scored, or `length` is none of a block.

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
        # Scoring needs none of the hooks of DDP, which would broadcast buffers; compiled or not.
        self.model: Any = model
        while isinstance(self.model, DistributedDataParallel) or hasattr(self.model, "_orig_mod"):
            self.model = getattr(self.model, "_orig_mod", None) or self.model.module
        self.store, self.micro_batch_size, self.group = store, micro_batch_size, group
        self.length = store.block_size if length is None else length
        several = dist.is_available() and dist.is_initialized()
        self.replicas = dist.get_world_size(group) if several else 1
        self.rank = dist.get_rank(group) if several else 0
        self.precision = ""
        self._in_slices, self._dtype = True, torch.float32  # the logits' type
        self._head: Any = getattr(self.model, "get_output_embeddings", lambda: None)()
        self._refuse_unfit()
        accepted = inspect.signature(self.model.forward).parameters
        is_open = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        self._options = {"use_cache": False} if is_open or "use_cache" in accepted else {}

    def _refuse_unfit(self) -> None:
        model, store, kind = self.model, self.store, type(self.model).__name__
        config: Any = getattr(model, "config", None)
        is_known = self._head is not None and hasattr(config, "get_text_config")
        if not is_known or getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{kind} has no config or no get_output_embeddings(), which tell its vocabulary "
                "and output layer, or has an encoder: give a causal language model of Hugging Face "
                "transformers."
            )
        config = config.get_text_config()
        tokens = min(self.length + 1, store.block_size)
        # rotary positions are unlimited, embedded ones are not
        positions = getattr(config, "max_position_embeddings", None) or tokens
        ends = any(
            isinstance(module, torch.nn.Embedding) and 0 <= len(module.weight) - positions < 3
            for name, module in model.named_modules()
            if "pos" in name or name.endswith("wpe")
        )
        # variables of a launcher alone may be left over
        is_alone = dist.is_torchelastic_launched() and not dist.is_initialized()
        started = int(os.environ.get("WORLD_SIZE", "1")) if is_alone else 1
        refuse_if(
            (self.micro_batch_size < 1,
             f"micro_batch_size is {self.micro_batch_size}, expected at least 1 block."),
            (started > 1,
             f"torchrun has started {started} processes, but there is no process group, so "
             "that each would train on its own: call init_process_group first."),
            (not 1 <= self.length <= store.block_size,
             f"length is {self.length}, expected 1 to {store.block_size} tokens, as many as a "
             f"block in {store.root} has, or None for whole blocks."),
            (any(parameter.is_meta for parameter in model.parameters()),
             f"weights of {kind} are on the device 'meta', without values: load them, whole or "
             "sharded by fully_shard, before."),
            (config.vocab_size < store.vocab_size,
             f"{kind} has {config.vocab_size} tokens, but the blocks in {store.root} have "
             f"{store.vocab_size}: prepare them with the model's tokenizer."),
            (ends and positions < tokens,
             f"{kind} has {positions} positions, but {tokens} tokens of the blocks in {store.root} "
             "are scored: prepare shorter blocks."),
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        weight: Any = next(self.model.parameters())
        if isinstance(weight, DTensor):  # FSDP2 may keep it on the CPU between passes
            return torch.device(weight.device_mesh.device_type)
        return torch.device(weight.device)

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
        return self.losses_at(block_ids, [self.length])[:, 0]

    def losses_at(self, block_ids: Ids, lengths: Sequence[int]) -> Nats:
        """Returns the losses over several lengths, cut from one pass, `[C, L]`; see `losses`."""
        # All replicas run equally many passes, which FSDP2 requires: the excess is padding.
        size, passes = scoring_passes(
            len(block_ids),
            micro_batch_size=self.micro_batch_size,
            replicas=self.replicas,
            prefix=max(lengths) / self.store.block_size,
        )
        padded = np.resize(block_ids, (self.replicas, passes, size))
        in_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        # Where autocast encloses the loop, it still has casts from before the optimizer's step.
        torch.clear_autocast_cache()
        try:
            with torch.no_grad():
                if not self.precision:
                    self._refuse_not_causal(padded[self.rank][0], max(lengths))
                parts = [self._mean_losses(ids, lengths) for ids in padded[self.rank]]
        finally:
            for module in in_training:
                module.training = True
            # Under autocast, training would otherwise reuse casts of weights without gradients.
            torch.clear_autocast_cache()
        loss = torch.cat(parts)
        if self.replicas > 1:
            own, loss = loss, loss.new_empty(self.replicas * len(loss), len(lengths))
            dist.all_gather_into_tensor(loss, own, group=self.group)
        return loss[: len(block_ids)].cpu().numpy()

    def from_first(self, function: Callable[[], T]) -> T:
        """Calls a function on the first rank; see `from_recorder`. Collective."""
        if self.replicas == 1:
            return function()
        return from_recorder(function, src=0, group=self.group)

    def _tokens(self, block_ids: Ids, length: int) -> torch.Tensor:
        """Returns the scored tokens of blocks and one more, the last target, `[B, S]`."""
        tokens = self.store.tokens(block_ids)[:, : length + 1]
        return torch.from_numpy(tokens).to(self.device).long()

    def _refuse_not_causal(self, block_ids: Ids, length: int) -> None:
        """Refuses a model whose losses of tokens change with the tokens after them, by one pass."""
        tokens_BS = self._tokens(block_ids, length)
        half = tokens_BS.shape[1] // 2
        other_BS = torch.cat([tokens_BS[:, :half], tokens_BS[:, half:].flip(1)], dim=1)
        change_BT = (self._token_losses(tokens_BS) - self._token_losses(other_BS)).abs()
        before, after = change_BT[:, : half - 1].mean().item(), change_BT[:, half:].mean().item()
        # experts may round otherwise beside other tokens
        if half > 1 and before > after * min(400 * torch.finfo(self._dtype).eps, 0.05):
            raise ValueError(
                f"{type(self.model).__name__} is not causal, or random in evaluation: with other "
                f"tokens after them, losses change by {before:.2g} nats; give a causal language "
                "model (is_decoder=True, if its config has that key)."
            )

    def _mean_losses(self, block_ids: Ids, lengths: Sequence[int]) -> torch.Tensor:
        """Returns the losses of the blocks of one pass, float32 `[B, L]`."""
        loss_BT = self._token_losses(self._tokens(block_ids, max(lengths))).double()
        return torch.stack([loss_BT[:, :n].mean(dim=1) for n in lengths], dim=1).float()

    def _token_losses(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns the losses of all tokens but the first, float32 `[B, T]`."""
        if self._in_slices:
            output_BS = self._forward_in_slices(tokens_BS)
            # Models with a soft cap or a scale on their logits have applied it to the losses.
            self._in_slices = bool((output_BS[:, -1] == _MARK).all())
        if self._in_slices:
            return output_BS[:, :-1]
        return self.token_losses(self._logits(tokens_BS)[:, :-1], tokens_BS[:, 1:])

    def _logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns the model's output in place of logits, `[B, S, ...]`."""
        output = self.model(input_ids=tokens_BS, **self._options)
        logits = getattr(output, "logits", None)
        if logits is None or logits.shape[:2] != tokens_BS.shape:
            shape = None if logits is None else [*logits.shape]
            raise ValueError(
                f"{type(self.model).__name__} returns logits {shape} of tokens "
                f"{[*tokens_BS.shape]}: give a causal language model of Hugging Face transformers, "
                "which returns an object with logits for every token."
            )
        return logits

    def _forward_in_slices(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Returns the token losses and, at the last position, a mark, float32 `[B, S]`.

        The output layer itself computes them, so that the logits of a whole block never exist,
        while FSDP2 has its weights gathered: the model passes them on in place of logits.
        """
        head, targets_BT = self._head, tokens_BS[:, 1:]
        own, forward = vars(head).get("forward"), head.forward

        def losses(hidden_BSH: torch.Tensor) -> torch.Tensor:
            if hidden_BSH.shape[:-1] != tokens_BS.shape:  # the model flattens them
                return forward(hidden_BSH)
            loss_BT = self.token_losses(hidden_BSH[:, :-1], targets_BT, forward)
            return torch.nn.functional.pad(loss_BT, (0, 1), value=_MARK)[..., None]

        head.forward = losses
        try:
            return self._logits(tokens_BS).squeeze(-1)
        finally:
            if own is None:
                del head.forward
            else:
                head.forward = own

    def token_losses(
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
            if not self.precision:
                self._dtype = logits_BsV.dtype
                weights = getattr(self._head, "weight", logits_BsV).dtype
                self.precision = precision_name(self._dtype, over=weights)
            flat = cross_entropy(
                logits_BsV.float().flatten(0, 1), targets_Bs.flatten(), reduction="none"
            )
            parts.append(flat.view(targets_Bs.shape))
            del logits_BsV  # two slices would not fit
        return torch.cat(parts, dim=1)
