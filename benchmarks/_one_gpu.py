"""A dense model that trains and scores on this process, with megatron-core's own parts.

Without a GPU the same model runs on the CPU, in fp32 and on gloo: tests/gpu does that, so that what
runs on a GPU is known to run. Weights are drawn on the CPU and are the same on every machine.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA or TransformerEngine

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from nemo_rod.corpus import BlockStore
from nemo_rod.megatron.batches import micro_batches

GIB = 2**30
BYTES_PER_PARAMETER = 18  # bf16 weights; fp32 gradients, weights and two moments


@dataclass(frozen=True)
class Size:
    """A dense model's shape; `tied` shares the embedding with the output layer."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    tied: bool = False

    def parameters(self, vocabulary: int) -> int:
        """Number of weights in matrices."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.groups)
        layer = attention + 3 * self.hidden * self.ffn
        return self.layers * layer + (1 if self.tied else 2) * vocabulary * self.hidden

    def forward_flops(self, vocabulary: int, length: int, *, logits: bool = True) -> float:
        """FLOPs of a forward pass per token; attention is causal."""
        embeddings = (1 if self.tied else 2) * vocabulary * self.hidden
        weights = self.parameters(vocabulary) - embeddings + logits * vocabulary * self.hidden
        return 2.0 * weights + 2.0 * self.layers * length * self.hidden


SIZES = {
    "tiny": Size(2, 64, 4, 2, 128),
    "05b": Size(24, 1024, 16, 8, 3072),
    "1b": Size(28, 1536, 16, 8, 6144),
    "4b": Size(36, 2560, 20, 10, 9728, tied=True),
}


def on_gpu() -> bool:
    return torch.cuda.is_available()


def start(tensor: int = 1) -> Any:
    """Joins torchrun's processes, or is the only one; returns Megatron's process groups."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # its notes would hide the tables
    if on_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if on_gpu() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    return ProcessGroupCollection.use_mpu_process_groups()


class Sdpa(MegatronModule):
    """Core attention by torch's fused kernels: Megatron's own holds all S x S scores."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # from [s, b, heads, d]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()


def make_model(
    size: Size,
    *,
    vocabulary: int,
    length: int,
    dtype: torch.dtype,
    layers: str = "local",
    tensor: int = 1,
    **options: Any,
) -> Any:
    """A model with made-up weights, on this process's device.

    Args:
        size: its shape.
        vocabulary: number of tokens it knows.
        length: tokens per block.
        dtype: of weights and activations.
        layers: "local", or "te" for TransformerEngine's.
        tensor: tensor-parallel processes, with sequence parallelism where there are several.
        options: more of Megatron's `TransformerConfig`.
    """
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.groups,
        kv_channels=size.hidden // size.heads,
        ffn_hidden_size=size.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **options},
    )
    if layers == "te":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = Sdpa
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=size.tied,
    )
    generator = torch.Generator().manual_seed(parallel_state.get_tensor_model_parallel_rank())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    return model.cuda()


class Training:
    """A model with its optimizer, and its steps over blocks of a store.

    Attributes:
        chunks: the model as Megatron's schedules take it.
        optimizer: Megatron's.
    """

    def __init__(
        self, model: Any, store: BlockStore, groups: Any, *, micro_batch_size: int, lr: float = 1e-3
    ) -> None:
        self.store, self.groups, self.micro_batch_size = store, groups, micro_batch_size
        config, sharded = model.config, on_gpu()
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=sharded,
            overlap_param_gather=sharded,
        )
        wrapped = DistributedDataParallel(config, ddp, model)
        self.chunks = [wrapped]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                bf16=config.params_dtype == torch.bfloat16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=sharded,
                clip_grad=1.0,
            ),
            self.chunks,
        )
        # as the trainers set them
        config.no_sync_func, config.grad_scale_func = wrapped.no_sync, self.optimizer.scale_loss
        self._schedule = get_forward_backward_func()

    def train_step(
        self,
        forward_step_func: Callable,
        num_blocks: int,
        model: list,
        forward_backward_func: Callable,
        global_state: Any,
        pg_collection: Any,
        data_iterator: Any = None,
    ) -> None:
        """An update, with the arguments of a trainer's `train_step` that a selector reads."""
        for chunk in model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(forward_backward_func, forward_step_func, num_blocks, data_iterator)
        self.optimizer.step()

    def plain(self, block_ids: np.ndarray, forward_step: Callable | None = None) -> None:
        """An ordinary update; `block_ids` int64 `[n]` are this replica's share."""
        data = micro_batches(self.store, block_ids, self.micro_batch_size)
        call = self.call(0, len(block_ids) * self.groups.dp.size(), forward_step)
        self.train_step(**{**call, "data_iterator": data})

    def rod(self, wrapped: Callable, step: int, num_blocks: int) -> None:
        """An update by `RoDSelector.wrap(training.train_step)`."""
        wrapped(**self.call(step, num_blocks))

    def call(
        self, step: int, num_blocks: int, forward_step: Callable | None = None
    ) -> dict[str, Any]:
        return {
            "forward_step_func": forward_step or self.forward_step,
            "num_blocks": num_blocks,
            "model": self.chunks,
            "forward_backward_func": self._schedule,
            "global_state": SimpleNamespace(train_state=SimpleNamespace(step=step)),
            "pg_collection": self.groups,
        }

    def forward(self, block_ids: np.ndarray) -> None:
        """The forward pass of training, without gradients."""
        data = micro_batches(self.store, block_ids, self.micro_batch_size)
        with torch.no_grad():
            count = len(block_ids) * self.groups.dp.size()
            self._run(self._schedule, self.forward_step, count, data, forward_only=True)

    def forward_step(self, batches: Any, model: Any) -> tuple:
        """As a trainer's: the output, and the loss function with the mask as first argument."""
        batch = next(batches)
        output = model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
        )
        return output, partial(_loss, batch["loss_mask"])

    def _run(
        self,
        schedule: Callable,
        forward_step: Callable,
        num_blocks: int,
        data: Any,
        forward_only: bool = False,
    ) -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=data,
            model=self.chunks,
            num_microbatches=num_blocks // (self.micro_batch_size * self.groups.dp.size()),
            seq_length=self.store.block_size,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )

    def state(self) -> dict[str, Any]:
        """Copies of all that an update changes: weights, optimizer and random states."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return {
            "weights": [w.detach().clone() for c in self.chunks for w in c.parameters()],
            "optimizer": [
                value.detach().clone()
                for one in optimizers
                for moments in one.optimizer.state.values()
                for value in moments.values()
                if torch.is_tensor(value)
            ],
            "random": [torch.get_rng_state(), torch.cuda.get_rng_state()],
            "tensor-parallel random": [state.clone() for state in tracker.get_states().values()],
        }


def _loss(mask: torch.Tensor, output: torch.Tensor, **_: Any) -> tuple:
    flat = mask.view(-1).float()
    total = (output.view(-1).float() * flat).sum()
    return total / flat.sum(), {"lm loss": total.detach()}
