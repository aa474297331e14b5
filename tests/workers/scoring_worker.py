"""Scores random blocks with small models; every rank prints lines of JSON.

    torchrun ... tests/workers/scoring_worker.py prefix TENSOR PIPELINE SEQUENCE
    torchrun ... tests/workers/scoring_worker.py context CONTEXT
    torchrun ... tests/workers/scoring_worker.py heads

`prefix` compares prefixes, and logits in slices, with whole blocks; `context` compares blocks whose
positions are split between ranks with plain arithmetic; `heads` compares a model with and without a
head for multi-token prediction.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA


class RandomBlocks:
    """A store of random tokens."""

    def __init__(self, count: int, block_size: int, vocabulary: int) -> None:
        self.shape, self.block_size, self.vocabulary = (count, block_size), block_size, vocabulary

    def tokens(self, block_ids: np.ndarray) -> np.ndarray:
        every = np.random.default_rng(0).integers(0, self.vocabulary, self.shape)
        return every[block_ids].astype(np.int32)


LENGTHS = (64, 32, 16, 8)  # of blocks of 64 tokens


def scorer(model: list, store: Any, *, length: int | None = None) -> Any:
    """The package's scorer of a model in the current layout, with micro-batches of two blocks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_rod.megatron.scoring.scorer import MegatronScorer

    return MegatronScorer(
        model, store, ProcessGroupCollection.use_mpu_process_groups(), micro_batch_size=2,
        length=length,
    )  # fmt: skip


def gpt(store: RandomBlocks, *, mtp_num_layers: int | None = None, **settings: Any) -> Any:
    """A GPT of two layers in the current layout."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, normalization="RMSNorm",
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        mtp_num_layers=mtp_num_layers, **settings,
    )  # fmt: skip
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    head = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=layer, mtp_block_spec=head,
        vocab_size=store.vocabulary, max_sequence_length=store.block_size,
        position_embedding_type="rope", pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def initialize(**layout: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def prefix(tensor: int, pipeline: int, sequence: int) -> None:
    from nemo_rod.megatron.scoring import logits

    layout = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    initialize(**layout)
    store, read = RandomBlocks(7, 64, 32), []
    model = gpt(
        store,
        **layout,
        sequence_parallel=bool(sequence),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        init_method_std=0.5,  # so that blocks and positions differ
    )

    def note_shape(_: object, arguments: tuple, named: dict) -> None:
        read.append(list(named["input_ids"].shape))

    model.register_forward_pre_hook(note_shape, with_kwargs=True)
    ids = np.array([5, 0, 3, 6, 1, 4, 2])
    cut = dict(zip(LENGTHS, scorer([model], store).losses_at(ids, LENGTHS).T, strict=True))
    # of two blocks as many bytes as a slice of 4 of their 64 tokens may have
    small = 4 * 2 * 4 * store.vocabulary // tensor
    for tokens, max_bytes in ((64, small), *((n, logits.MAX_LOGITS_BYTES) for n in LENGTHS[1:])):
        read.clear()
        with patch.object(logits, "MAX_LOGITS_BYTES", max_bytes):
            length = logits.slice_length(2, store.vocabulary // tensor)
            losses = scorer([model], store, length=tokens).losses(ids)
        report(
            tokens=tokens, slice=length, shape=losses.shape, read=read,
            largest=float(np.abs(cut[tokens]).max()),
            difference=float(np.abs(losses - cut[tokens]).max()),
        )  # fmt: skip


class OnePositionAtATime(torch.nn.Module):
    """Attention across ranks needs TransformerEngine and so a GPU; this model has none."""

    def __init__(self, config: object, vocabulary: int) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.table = torch.rand(vocabulary, vocabulary, generator=torch.Generator().manual_seed(1))

    def set_input_tensor(self, _: object) -> None: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        return self.table[input_ids, labels] * (1 + position_ids)


def context(size: int) -> None:
    from megatron.core.transformer import TransformerConfig

    initialize(context_parallel_size=size)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=size
    )
    store = RandomBlocks(6, 64, 11)
    model = OnePositionAtATime(config, store.vocabulary)
    ids = np.array([5, 0, 3, 2, 1, 4])
    tokens = store.tokens(ids)
    loss = model.table.numpy()[tokens[:, :-1], tokens[:, 1:]] * (1 + np.arange(63))
    differences = [
        scorer([model], store, length=n).losses(ids) - loss[:, :n].mean(axis=1) for n in LENGTHS[:3]
    ]
    report(largest_difference=max(float(np.abs(one).max()) for one in differences))


def heads() -> None:
    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.megatron.objective import refuse_other_losses

    initialize()
    store, ids = RandomBlocks(4, 16, 32), np.arange(4)
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    plain, model = gpt(store, **no_dropout), gpt(store, mtp_num_layers=1, **no_dropout)
    model.load_state_dict(plain.state_dict(), strict=False)
    calls = {"output layer": 0, "head": 0}

    def count(name: str, module: torch.nn.Module) -> None:
        def hook(*_: Any) -> None:
            calls[name] += 1

        module.register_forward_pre_hook(hook)

    count("output layer", model.output_layer)
    count("head", model.mtp.layers[0])
    expected, losses = (scorer([one], store).losses(ids) for one in (plain, model))
    scoring = dict(calls)
    (batch,) = micro_batches(store, ids, 4)  # type: ignore[arg-type]
    model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    training = {name: calls[name] - scoring[name] for name in calls}
    assert refuse_other_losses([plain]) == [plain]
    refused = ""
    try:
        refuse_other_losses([model])
    except ValueError as error:
        refused = str(error)
    same = bool((expected == losses).all())
    report(same=same, scoring=scoring, training=training, refused=refused)


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = {"prefix": prefix, "context": context, "heads": heads}
    cases[sys.argv[1]](*map(int, sys.argv[2:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
