"""Conversion of blocks of tokens to the batches that NeMo-RL's workers read."""

from __future__ import annotations

from typing import Any

import numpy as np


def train_batch(tokens: np.ndarray) -> Any:
    """Returns a batch of blocks in which every token counts.

    Args:
        tokens: tokens of the blocks, int32 `[n, S]`.

    Returns:
        A BatchedDataDict of `input_ids` int64 `[n, S]`, `input_lengths` int64 `[n]`, `token_mask`
        float32 `[n, S]` and `sample_mask` float32 `[n]`. NeMo-RL masks targets, so the mask's first
        column is never used: S - 1 targets.
    """
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    input_ids = torch.from_numpy(tokens.astype(np.int64))
    count, size = input_ids.shape
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.full((count,), size),
            "token_mask": torch.ones(count, size),
            "sample_mask": torch.ones(count),
        }
    )
