"""Scores blocks with one model, with and without a multi-token-prediction head; prints both.

torchrun ... tests/workers/multi_token_worker.py
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

BLOCKS, BLOCK_SIZE, VOCABULARY = 4, 16, 32


class Store:
    block_size = BLOCK_SIZE

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, VOCABULARY, (BLOCKS, BLOCK_SIZE))
        return every[block_ids].astype(np.int32)


def build(mtp_num_layers: int | None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=mtp_num_layers,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    head = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=head,
        vocab_size=VOCABULARY,
        max_sequence_length=BLOCK_SIZE,
        position_embedding_type="rope",
    )


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.megatron.objective import refuse_other_losses
    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    plain, model = build(None), build(1)
    model.load_state_dict(plain.state_dict(), strict=False)
    calls = {"output layer": 0, "head": 0}

    def count(name: str, module: torch.nn.Module) -> None:
        def hook(*_: Any) -> None:
            calls[name] += 1

        module.register_forward_pre_hook(hook)

    count("output layer", model.output_layer)
    count("head", model.mtp.layers[0])
    store, groups = Store(), ProcessGroupCollection.use_mpu_process_groups()

    def sums(of: Any) -> np.ndarray:
        return MegatronScorer(
            [of],
            store,  # type: ignore[arg-type]
            groups,
            micro_batch_size=2,
            batches=lambda ids, size: micro_batches(store, ids, size),  # type: ignore[arg-type]
        ).part_sums(np.arange(BLOCKS))

    same = bool((sums(plain) == sums(model)).all())
    scoring = dict(calls)
    (batch,) = micro_batches(store, np.arange(BLOCKS), BLOCKS)  # type: ignore[arg-type]
    model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    training = {name: calls[name] - scoring[name] for name in calls}
    refused = ""
    assert refuse_other_losses([plain]) == [plain]
    try:
        refuse_other_losses([model])
    except ValueError as error:
        refused = str(error)
    found = {"same": same, "scoring": scoring, "training": training, "refused": refused}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
