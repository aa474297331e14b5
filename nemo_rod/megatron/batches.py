"""Turns block ids into the micro-batches that Megatron's schedules read.

Every rank reads its own blocks from the store: no token ever crosses ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nemo_rod.corpus.store import BlockStore

Batch = dict[str, torch.Tensor]


def micro_batches(
    store: BlockStore, block_ids: np.ndarray, micro_batch_size: int
) -> Iterator[Batch]:
    """Yields batches of `micro_batch_size` blocks in order.

    Args:
        store: the block store that holds the tokens.
        block_ids: ids of the blocks, int64 `[n]`, n a multiple of `micro_batch_size`.
        micro_batch_size: blocks per batch.

    Yields:
        `tokens`, `labels`, `position_ids` int64 `[b, S]` and `loss_mask` float32 `[b, S]`. Token j
        predicts token j + 1, so the last position has no target and is masked: S - 1 targets.
    """
    assert len(block_ids) % micro_batch_size == 0
    for start in range(0, len(block_ids), micro_batch_size):
        yield _batch(store.tokens(block_ids[start : start + micro_batch_size]))


def checked_micro_batches(
    store: BlockStore, block_ids: np.ndarray, micro_batch_size: int
) -> Iterator[Batch]:
    """Yields `micro_batches` of blocks that have been compared with their hashes.

    Raises:
        ValueError: a block was changed or damaged; the message names the file and the block.
    """
    assert len(block_ids) % micro_batch_size == 0
    tokens_NS = store.checked_tokens(block_ids)
    for start in range(0, len(block_ids), micro_batch_size):
        yield _batch(tokens_NS[start : start + micro_batch_size])


def _batch(tokens_BS: np.ndarray) -> Batch:
    tokens = torch.from_numpy(tokens_BS.astype(np.int64))
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    loss_mask[:, -1] = 0
    position_ids = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    batch = {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "loss_mask": loss_mask,
        "position_ids": position_ids,
    }
    return {name: tensor.cuda(non_blocking=True) for name, tensor in batch.items()}


def prefixes(batches: Iterator[Batch], length: int) -> Iterator[Batch]:
    """Yields the first `length` positions of batches `[b, S]`; the last of them has a target."""
    for batch in batches:
        yield {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}
