"""Scores blocks on ranks that share every block's positions; each rank prints what it gets.

torchrun ... tests/workers/context_worker.py

Attention across ranks needs TransformerEngine and so a GPU. This model looks at one position at a
time; schedule, groups, dealing out and adding up are the real ones.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

CONTEXT, BLOCKS, BLOCK_SIZE, VOCABULARY = int(sys.argv[1]), 6, 64, 11


class Store:
    block_size = BLOCK_SIZE

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, VOCABULARY, (BLOCKS, BLOCK_SIZE))
        return every[block_ids].astype(np.int32)


class OnePositionAtATime(torch.nn.Module):
    def __init__(self, config: object) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.table = torch.rand(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def set_input_tensor(self, _: object) -> None: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        return self.table[input_ids, labels] * (1 + position_ids)


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=CONTEXT)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=CONTEXT
    )
    model, store = OnePositionAtATime(config), Store()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ids = np.array([5, 0, 3, 2, 1, 4])
    scorer = MegatronScorer(
        [model],
        store,  # type: ignore[arg-type]
        groups,
        micro_batch_size=2,
        batches=lambda ids, size: micro_batches(store, ids, size),  # type: ignore[arg-type]
    )
    tokens = store.tokens(ids)
    loss = model.table.numpy()[tokens[:, :-1], tokens[:, 1:]] * (1 + np.arange(BLOCK_SIZE - 1))
    expected = np.pad(loss, ((0, 0), (0, 1))).reshape(BLOCKS, 8, -1).sum(axis=-1)
    worst = max(
        float(np.abs(scorer.part_sums(ids, eighths) - expected[:, :eighths]).max())
        for eighths in (8, 4, 2)
    )
    print(json.dumps({"largest difference": worst}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
