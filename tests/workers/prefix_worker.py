"""Scores whole blocks and prefixes of them with one model; each rank prints how far they differ.

And so it does with the whole blocks' logits in slices.

torchrun ... tests/workers/prefix_worker.py TENSOR PIPELINE SEQUENCE
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

BLOCKS, BLOCK_SIZE, VOCABULARY = 7, 64, 32


class Store:
    block_size = BLOCK_SIZE

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, VOCABULARY, (BLOCKS, BLOCK_SIZE))
        return every[block_ids].astype(np.int32)


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.megatron.scoring import logits
    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    tensor, pipeline, sequence = (int(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=bool(sequence),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=0.5,  # so that blocks and positions differ
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=BLOCK_SIZE,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    store, read = Store(), []
    scorer = MegatronScorer(
        [model],
        store,  # type: ignore[arg-type]
        ProcessGroupCollection.use_mpu_process_groups(),
        micro_batch_size=2,
        batches=lambda ids, size: micro_batches(store, ids, size),  # type: ignore[arg-type]
    )

    def note_shape(_: object, arguments: tuple, named: dict) -> None:
        read.append(list(named["input_ids"].shape))

    model.register_forward_pre_hook(note_shape, with_kwargs=True)
    ids = np.array([5, 0, 3, 6, 1, 4, 2])
    whole = scorer.part_sums(ids)
    # of two blocks as many bytes as a slice of 4 of their 64 tokens may have
    small = 4 * 2 * 4 * VOCABULARY // tensor
    for eighths, max_bytes in (
        (8, small),
        *((e, logits.MAX_LOGITS_BYTES) for e in (4, 2, 1)),
    ):
        read.clear()
        with patch.object(logits, "MAX_LOGITS_BYTES", max_bytes):
            length = logits.slice_length(2, VOCABULARY // tensor)
            sums = scorer.part_sums(ids, eighths)
        found = {
            "eighths": eighths,
            "slice": length,
            "shape": sums.shape,
            "read": read,
            "largest": float(np.abs(whole[:, :eighths]).max()),
            "difference": float(np.abs(sums - whole[:, :eighths]).max()),
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
