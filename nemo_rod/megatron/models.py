"""Hugging Face checkpoint -> Megatron model in any layout, and back, by Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge


def model_provider(
    hf: str, *, data: int, tensor: int, pipeline: int, precision: str, block_size: int
) -> tuple[AutoBridge, Any]:
    """Loads a Hugging Face checkpoint's description for a parallel layout.

    Args:
        hf: name or folder of the Hugging Face checkpoint.
        data: replicas; only checked against the world size.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        precision: "fp32" or "bf16".
        block_size: tokens of a block (S).

    Returns:
        The bridge, which can export the model again, and the provider, which builds it with the
        checkpoint's weights.

    Raises:
        ValueError: if the layout does not divide the model or the processes.
    """
    bridge = AutoBridge.from_hf_pretrained(hf)
    provider = bridge.to_megatron_provider(load_weights=True)
    _check_layout(provider, hf, data=data, tensor=tensor, pipeline=pipeline)
    # Bridge skips the initialisation of weights that it is about to load, and with it the marks
    # of tensor-parallel parameters: the clipped gradient norm would silently lose shards.
    provider.perform_initialization = True
    provider.tensor_model_parallel_size = tensor
    provider.pipeline_model_parallel_size = pipeline
    provider.seq_length = block_size
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = precision == "bf16", False
    if not torch.cuda.is_available():
        _use_plain_torch(provider)
    return bridge, provider


def save_hf(bridge: AutoBridge, model: list, folder: Path) -> None:
    """Writes the trained model as a Hugging Face checkpoint; every rank takes part."""
    bridge.save_hf_pretrained(model, folder, show_progress=False)


def _check_layout(provider: Any, hf: str, *, data: int, tensor: int, pipeline: int) -> None:
    heads, groups = provider.num_attention_heads, provider.num_query_groups or 0
    for what, count, axis, size in (
        ("layers", provider.num_layers, "pipeline", pipeline),
        ("attention heads", heads, "tensor", tensor),
        ("key-value heads", groups or heads, "tensor", tensor),
    ):
        if count % size:
            raise ValueError(
                f"parallel.{axis}={size} does not divide the {count} {what} of {hf}: "
                f"choose a {axis} size that does."
            )
    world = torch.distributed.get_world_size()
    if world != data * tensor * pipeline:
        raise ValueError(
            f"parallel.data={data} x tensor={tensor} x pipeline={pipeline} needs "
            f"{data * tensor * pipeline} processes, but {world} are running."
        )


def _use_plain_torch(provider: Any) -> None:
    """Without CUDA there are no fused kernels: use Megatron's own torch layers."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider.transformer_layer_spec = local_layer_spec
    for fusion in (
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "cross_entropy_loss_fusion",
    ):
        setattr(provider, fusion, False)
