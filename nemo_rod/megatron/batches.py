"""Turns block ids into the micro-batches that Megatron's schedules read.

Every rank reads its own blocks from the store: no token ever crosses ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import tee
from typing import Any

import numpy as np
import torch

from nemo_rod.corpus.store import BlockStore

Batch = dict[str, torch.Tensor]


def micro_batches(
    store: BlockStore,
    block_ids: np.ndarray,
    micro_batch_size: int,
    *,
    length: int | None = None,
    checked: bool = False,
) -> Iterator[Batch]:
    """Yields batches of `micro_batch_size` blocks in order.

    Args:
        store: the block store that holds the tokens.
        block_ids: ids of the blocks, int64 `[n]`, n a multiple of `micro_batch_size`.
        micro_batch_size: blocks per batch.
        length: leading positions of every block, s; None for all, S.
        checked: compare all blocks with their hashes first.

    Yields:
        `tokens`, `labels`, `position_ids` int64 `[b, s]` and `loss_mask` float32 `[b, s]`. Token j
        predicts token j + 1, so the last position of a block has no target and is masked: S - 1
        targets.

    Raises:
        ValueError: a block was changed or damaged; the message names the file and the block.
    """
    assert len(block_ids) % micro_batch_size == 0
    size, length = store.block_size, length or store.block_size
    checked_NS = store.checked_tokens(block_ids) if checked else None
    for start in range(0, len(block_ids), micro_batch_size):
        here = slice(start, start + micro_batch_size)
        tokens_BS = store.tokens(block_ids[here]) if checked_NS is None else checked_NS[here]
        # sent as int32; everything else is derived on the device
        sent = tokens_BS[:, : length + 1]  # a prefix's last target is the token after it
        tokens = on_device(torch.from_numpy(np.ascontiguousarray(sent, dtype=np.int32))).long()
        labels = tokens.roll(-1, dims=1)[:, :length].contiguous()
        tokens = tokens[:, :length].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        if length == size:
            loss_mask[:, -1] = 0
        places = torch.arange(length, device=tokens.device).expand_as(tokens).contiguous()
        batch = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        yield {**batch, "position_ids": places}


def batches_of(blocks: Any) -> Callable[..., Iterator[Batch]]:
    """Returns the `micro_batches` of blocks: their own, of the same parameters, or a store's."""
    return getattr(blocks, "micro_batches", None) or partial(micro_batches, blocks)


def for_each(batches: Iterator[Batch], count: int) -> list[Iterator[Batch]]:
    """Returns `count` iterators over the same batches, each of which is made once.

    Chunks of a model under virtual pipeline parallelism read the batches at their own pace.
    """
    return [map(dict, copy) for copy in tee(batches, count)]  # a reader may add to its batch


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of the host to this rank's device, without waiting for the device."""
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.cuda(non_blocking=True)
