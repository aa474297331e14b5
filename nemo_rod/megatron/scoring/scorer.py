"""Losses of blocks under the current weights: a forward-only pass under TP, PP, CP, EP and DP.

Shapes: C blocks, S tokens per block, L scored lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from nemo_rod.megatron.batches import batches_of, for_each
from nemo_rod.megatron.scoring.forward_only import (
    gather_weights,
    overlaps_tensor_parallel,
    refuse_unsafe,
)
from nemo_rod.megatron.scoring.low_precision import low_precision, refuse_unfit
from nemo_rod.megatron.scoring.scoring_pass import ForwardStep, plain_forward_step, scoring_pass
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.dealing import scoring_passes


@dataclass(eq=False)
class MegatronScorer:
    """Scores blocks of a store with a Megatron model.

    Raises:
        ValueError: the model uses a feature that breaks scoring, or has layers without FP8.
    """

    model: list  # its chunks on this rank, wrapped for data parallelism or not
    store: Blocks  # holds the blocks; see `batches_of`
    groups: Any  # Megatron's process groups (`tp`, `pp`, `cp` and `dp` are used)
    _: KW_ONLY
    # blocks in one forward pass of one replica, which may differ from training's; of prefixes more,
    # up to the same number of tokens
    micro_batch_size: int
    length: int | None = None  # leading tokens of a block that are scored; None for all, S
    beat: Callable[[], None] = lambda: None  # heartbeat, called after every micro-batch
    # reads a micro-batch and runs the model on it; by default plain causal language modelling
    forward_step: ForwardStep | None = None
    precision: str | None = None  # "fp8" (`low_precision.py`), None for the model's own

    def __post_init__(self) -> None:
        self.config = get_model_config(self.model[0])
        ddp_config = getattr(self.model[0], "ddp_config", None)
        refuse_unsafe(self.config, ddp_config)
        refuse_unfit(self.model, self.precision)

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return int(self.groups.dp.size())

    def losses(self, block_ids: np.ndarray) -> np.ndarray:
        """Returns the losses of blocks over the scored length. Collective over all ranks.

        Args:
            block_ids: ids of the blocks, int64 `[C]`, the same on every rank.

        Returns:
            Nats per token, float32 `[C]`, the same on every rank.
        """
        return self.losses_at(block_ids, [self.length or self.store.block_size])[:, 0]

    def losses_at(self, block_ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Returns the losses of blocks over several lengths, cut from one pass; see `losses`.

        Returns:
            Nats per token, float32 `[C, L]`, the same on every rank.
        """
        length = max(lengths)
        share, size = self._share(block_ids, length)
        batches = batches_of(self.store)(share, size, length=length)
        per_chunk = for_each(batches, len(self.model))
        pipeline: dict[str, Any] = {}
        if self.groups.pp.size() > 1:  # megatron-core 0.15 rejects it otherwise
            pipeline["p2p_communicator"] = P2PCommunicator(
                pp_group=self.groups.pp, config=self.config
            )
        gather_weights(self.model)
        with low_precision(self.model, self.precision):
            outputs = scoring_pass(
                get_forward_backward_func(),
                self.model,
                self.forward_step or partial(plain_forward_step, cp=self.groups.cp),
                beat=self.beat,
                cp=self.groups.cp,
                lengths=lengths,
                data_iterator=per_chunk if len(per_chunk) > 1 else per_chunk[0],
                num_microbatches=len(share) // size,
                seq_length=length,
                micro_batch_size=size,
                pg_collection=self.groups,
                **pipeline,
            )
        gathered = on_every_rank(outputs, len(share), len(lengths), self.groups)
        return gathered.flatten(0, 1)[: len(block_ids)].cpu().numpy()

    def _share(self, block_ids: np.ndarray, length: int) -> tuple[np.ndarray, int]:
        """Returns this replica's slice, padded with repeats, and its blocks per forward pass."""
        count, replicas = len(block_ids), self.replicas
        if overlaps_tensor_parallel(self.config):  # then a smaller micro-batch does not run
            count += -count % (self.micro_batch_size * replicas)
        size, passes = scoring_passes(
            count,
            micro_batch_size=self.micro_batch_size,
            replicas=replicas,
            pipeline=self.groups.pp.size(),
            chunks=len(self.model),
            prefix=length / self.store.block_size,
        )
        padded = np.resize(block_ids, size * passes * replicas)
        return np.split(padded, replicas)[self.groups.dp.rank()], size


def on_every_rank(
    outputs: list[torch.Tensor], count: int, columns: int, groups: Any
) -> torch.Tensor:
    """Gathers the losses of every replica's last stage on every rank. Collective.

    Args:
        outputs: losses, float32 `[b, columns]` per micro-batch; empty on other stages.
        count: rows per replica, over all its micro-batches.
        columns: losses of a block.
        groups: Megatron's process groups (`tp`, `cp`, `pp` and `dp` are used).

    Returns:
        float32 `[replicas, count, columns]`, bit-identical on every rank.
    """
    dp, pp = groups.dp, groups.pp
    own = torch.empty(count, columns, dtype=torch.float32).cuda()
    if outputs:
        torch.cat(outputs, out=own)
        # each of these ranks has computed its own losses, which may differ in the last bit
        for group in (groups.tp, groups.cp):
            if group.size() > 1:
                dist.broadcast(own, group=group, group_src=0)
    if pp.size() > 1:  # only the last stage has losses
        dist.broadcast(own, group=pp, group_src=pp.size() - 1)
    if dp.size() == 1:
        return own[None]
    gathered = torch.empty(dp.size() * count, columns, dtype=torch.float32).cuda()
    dist.all_gather_into_tensor(gathered, own, group=dp)
    return gathered.view(dp.size(), count, columns)
