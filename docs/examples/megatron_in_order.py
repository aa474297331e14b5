"""Reads a curriculum materialised for Megatron in its own order: Megatron's GPTDataset shuffles.

In pretrain_gpt.py of Megatron-LM, with --dataloader-type single, --seq-length as the block size and
--global-batch-size as the blocks of a step, which is what `.manifest.json` says:

    def train_valid_test_datasets_provider(num_samples, vp_stage=None):
        return InOrder("data/__megatron__/blocks"), None, None
"""

import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset


class InOrder(torch.utils.data.Dataset):
    """Blocks of S tokens; as in nemo_rod the last position has no target."""

    def __init__(self, prefix: str) -> None:
        self.blocks = IndexedDataset(prefix)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.blocks[index].astype("int64"))
        loss_mask = torch.ones(len(tokens))
        loss_mask[-1] = 0.0
        causal = torch.ones(1, len(tokens), len(tokens)).tril() < 0.5
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "loss_mask": loss_mask,
            "attention_mask": causal,
            "position_ids": torch.arange(len(tokens)),
        }
