"""The losses of blocks under the current weights: a forward-only pass under TP, PP and DP.

Shapes: C blocks, S tokens per block. A block's loss comes as 8 partial sums (paper, "Sequence-level
loss and reference caching"), so that the loss of any prefix of S/8 steps needs no other pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from nemo_rod.corpus.store import BlockStore
from nemo_rod.megatron.batches import micro_batches
from nemo_rod.megatron.forward_only import forward_only, refuse_unsafe
from nemo_rod.megatron.logits import sliced_logits
from nemo_rod.selection.curriculum_header import Store
from nemo_rod.selection.reference_folder import NUM_CHUNKS

Batch = dict[str, torch.Tensor]
# (micro-batches, chunk of the model) -> what the chunk gives, and the mask of its losses
ForwardStep = Callable[[Any, Any], tuple[Any, torch.Tensor]]


class BlockLosses:
    """Scores blocks of a store with a Megatron model.

    Args:
        model: the model's chunks on this rank, wrapped for data parallelism or not.
        store: where the blocks are.
        groups: Megatron's process groups (`pp` and `dp` are used).
        micro_batch_size: blocks in one forward pass of one replica. It need not be training's.
        beat: called after every micro-batch.
        batches: gives the micro-batches of blocks int64 `[c]`, in order; by default those of
            `micro_batches`.
        forward_step: how a micro-batch is read and goes through the model; by default as plain
            causal language modelling.

    Raises:
        ValueError: if the model uses a feature under which scoring goes wrong.
    """

    def __init__(
        self,
        model: list,
        store: BlockStore | Store,
        groups: Any,
        *,
        micro_batch_size: int,
        beat: Callable[[], None] = lambda: None,
        batches: Callable[[np.ndarray], Iterator[Batch]] | None = None,
        forward_step: ForwardStep | None = None,
    ) -> None:
        self.model, self.store, self.groups = model, store, groups
        self.micro_batch_size, self.beat = micro_batch_size, beat
        if batches is None:
            assert isinstance(store, BlockStore), "other blocks come with their batches"
            batches = partial(micro_batches, store, micro_batch_size=micro_batch_size)
        self.batches = batches
        self.forward_step = forward_step or plain_forward_step
        self.config = get_model_config(model[0])
        refuse_unsafe(self.config, getattr(model[0], "ddp_config", None))

    def chunk_sums(self, block_ids: np.ndarray) -> np.ndarray:
        """Partial sums of the token losses of blocks; a collective call of all ranks.

        Args:
            block_ids: int64 `[C]`, the same on every rank.

        Returns:
            float32 `[C, 8]` in nats, the same on every rank: sums over eighths of the block.
        """
        dp, pp = self.groups.dp, self.groups.pp
        mine = self._share(block_ids)
        sums = torch.empty(len(mine), NUM_CHUNKS, dtype=torch.float32).cuda()
        outputs = self._forward(mine)
        if outputs:
            torch.cat(outputs, out=sums)
        if pp.size() > 1:  # only the last stage has losses
            dist.broadcast(sums, group=pp, group_src=pp.size() - 1)
        if dp.size() > 1:
            everyone = torch.empty(dp.size() * len(mine), NUM_CHUNKS, dtype=torch.float32).cuda()
            dist.all_gather_into_tensor(everyone, sums, group=dp)
            sums = everyone
        return sums[: len(block_ids)].cpu().numpy()

    def own_chunk_sums(self, block_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Partial sums of this replica's share of blocks; a collective call of all ranks.

        Args:
            block_ids: int64 `[C]`, the same on every rank.

        Returns:
            The share, int64 `[c]`, which may be empty, and its sums, float32 `[c, 8]` in nats; None
            in place of the sums on ranks that have no losses, which are all but the last stage's.
        """
        mine = self._share(block_ids)
        outputs = self._forward(mine)
        count = max(0, len(block_ids) - self.groups.dp.rank() * len(mine))
        sums = torch.cat(outputs)[:count].cpu().numpy() if outputs else None
        return mine[:count], sums

    def _share(self, block_ids: np.ndarray) -> np.ndarray:
        """This replica's slice, filled up with repeats to whole micro-batches."""
        per_rank = -(-len(block_ids) // (self.groups.dp.size() * self.micro_batch_size))
        per_rank *= self.micro_batch_size
        padded = np.resize(block_ids, per_rank * self.groups.dp.size())
        start = self.groups.dp.rank() * per_rank
        return padded[start : start + per_rank]

    def _forward(self, block_ids: np.ndarray) -> list[torch.Tensor]:
        batches = [self.batches(block_ids) for _ in self.model]
        pipeline: dict[str, Any] = {}
        if self.groups.pp.size() > 1:  # megatron-core 0.15 does not take it otherwise
            pipeline["p2p_communicator"] = P2PCommunicator(
                pp_group=self.groups.pp, config=self.config
            )
        outputs = scoring_pass(
            get_forward_backward_func(),
            self.model,
            self.forward_step,
            beat=self.beat,
            data_iterator=batches if len(batches) > 1 else batches[0],
            num_microbatches=len(block_ids) // self.micro_batch_size,
            seq_length=self.store.block_size,
            micro_batch_size=self.micro_batch_size,
            pg_collection=self.groups,
            **pipeline,
        )
        return [output[:, :NUM_CHUNKS] for output in outputs]


def scoring_pass(
    schedule: Callable[..., list[torch.Tensor]],
    model: list,
    forward_step: ForwardStep,
    *,
    beat: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[torch.Tensor]:
    """Runs a trainer's schedule forward-only for the losses of its samples.

    Args:
        schedule: the trainer's forward-backward function.
        model: the model's chunks on this rank.
        forward_step: how a micro-batch goes through the model.
        beat: called after every micro-batch.
        options: what else the schedule is called with.

    Returns:
        float32 `[b, 9]` per micro-batch on ranks of the last pipeline stage, nothing elsewhere:
        the sums of the token losses over eighths of each sample, in nats, and how many targets
        they are of.
    """

    def step(batches: Any, chunk: Any, *_: Any) -> tuple:
        output, loss_mask = forward_step(batches, chunk)
        beat()
        return output, partial(_chunk_sums, loss_mask)

    with forward_only(model, get_model_config(model[0])), sliced_logits(model):
        return schedule(
            forward_step_func=step,
            model=model,
            forward_only=True,
            collect_non_loss_data=True,
            **options,
        )


def plain_forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, torch.Tensor]:
    """Causal language modelling of one micro-batch: token losses `[b, S]` and their mask."""
    batch = next(batches)
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return output, batch["loss_mask"]


def _chunk_sums(
    loss_mask: torch.Tensor, loss: torch.Tensor, non_loss_data: bool = True
) -> torch.Tensor:
    """Token losses `[b, S]` -> float32 `[b, 9]`: sums over eighths, and the number of targets."""
    mask = loss_mask.view(loss.shape).float()
    sums = (loss.float() * mask).view(len(loss), NUM_CHUNKS, -1).sum(dim=-1)
    return torch.cat([sums, mask.sum(dim=-1, keepdim=True)], dim=1)
