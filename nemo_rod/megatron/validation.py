"""Held-out losses per source while a run trains."""

from __future__ import annotations

import numpy as np
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.utils.pg_utils import get_pg_collection

from nemo_rod.corpus.store import BlockStore
from nemo_rod.megatron.losses import BlockLosses
from nemo_rod.selection import block_loss


class Validation(Callback):
    """Every so many steps, the loss on the first held-out blocks of every source.

    Args:
        store: the held-out blocks.
        every: steps between two looks; 0 for never.
        num_blocks: blocks per source, at most.
        micro_batch_size: blocks in one forward pass of one replica.

    Attributes:
        metrics: `validation/<role>/<source>/loss` in nats per token after the step that just
            ended; empty if it was none to look at.
    """

    def __init__(
        self, store: BlockStore, *, every: int, num_blocks: int, micro_batch_size: int
    ) -> None:
        self.store, self.every, self.micro_batch_size = store, every, micro_batch_size
        self.ids = {
            f"validation/{source.role}/{source.name}/loss": source.start
            + np.arange(min(source.count, num_blocks))
            for source in store.sources
        }
        self.metrics: dict[str, float] = {}

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Scores the held-out blocks if it is time to; all ranks take part."""
        self.metrics = {}
        done = context.state.train_state.step + 1  # the counter moves after this callback
        if not self.every or done % self.every:
            return
        groups = get_pg_collection(context.model[0])
        losses = BlockLosses(
            context.model, self.store, groups, micro_batch_size=self.micro_batch_size
        )
        sums = losses.chunk_sums(np.concatenate(list(self.ids.values())))
        loss = block_loss(sums, self.store.block_size).astype(np.float64)
        starts = np.cumsum([0, *(len(ids) for ids in self.ids.values())])
        for name, start, stop in zip(self.ids, starts, starts[1:], strict=False):
            self.metrics[name] = float(loss[start:stop].mean())
