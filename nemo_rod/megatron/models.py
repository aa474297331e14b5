"""Conversion of Hugging Face checkpoints to Megatron models of any layout and back, by Bridge."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state

from nemo_rod.config import DTYPES, Model, Parallel
from nemo_rod.jobs import ModelJob
from nemo_rod.layout import check_layers, check_parallel
from nemo_rod.megatron import STAND_INS
from nemo_rod.megatron.delta_net import refuse_faulty_kernels
from nemo_rod.megatron.gaps import refuse_gaps
from nemo_rod.megatron.objective import next_token_alone, refuse_other_losses
from nemo_rod.terms import make_terms
from nemo_rod.trust import explain_own_code
from nemo_rod.upstream import functions


def model_provider(
    hf: str, parallel: Parallel, model: Model, *, block_size: int
) -> tuple[AutoBridge, Any]:
    """Loads a Hugging Face checkpoint's description for a parallel layout.

    Args:
        hf: name or folder of the Hugging Face checkpoint.
        parallel: the parallel layout.
        model: precision, attributes of the provider, and whether the checkpoint's code may run.
        block_size: tokens per block (S).

    Returns:
        The bridge, which can export the model again, and the provider, which builds it with the
        checkpoint's weights and raises ValueError if some are missing.

    Raises:
        ValueError: the layout does not fit the model or the number of processes, the checkpoint's
            code may not run, or kernels of its layers are at fault on this GPU.
    """
    for stand_in in STAND_INS:
        stand_in.prepare_bridge()
    trusted = model.trust_remote_code
    own: dict[str, Any] = {} if trusted else {"auto_map": None}  # Bridge would prefer its class
    with explain_own_code(f"The checkpoint {hf}"):
        bridge = AutoBridge.from_hf_pretrained(hf, trust_remote_code=trusted, **own)
    text: Any = bridge.hf_pretrained.config.get_text_config()
    if dataclasses.is_dataclass(type(text)):  # Bridge takes counts that this class does not read
        fields = {field.name for field in dataclasses.fields(text)}
        read = {*text.attribute_map, *text.attribute_map.values(), *fields}
        for name in {"num_experts", "num_local_experts", "n_routed_experts"} - read:
            vars(text).pop(name, None)
    provider = bridge.to_megatron_provider(load_weights=True)
    if getattr(provider, "position_embedding_type", "") == "yarn":  # as published, by default
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
    refuse_faulty_kernels(provider)
    refuse_gaps(provider, bridge.hf_pretrained.state, hf)
    number_text(provider)
    next_token_alone(provider)
    provider.register_pre_wrap_hook(functools.partial(_correct, provider))
    provider.register_pre_wrap_hook(refuse_other_losses)
    _check_layout(provider, hf, parallel)
    # Bridge skips the initialisation of weights that it will load, and thereby the marks of
    # tensor-parallel parameters: the clipped gradient norm would lose shards.
    provider.perform_initialization = True
    provider.tensor_model_parallel_size = parallel.tensor
    provider.pipeline_model_parallel_size = parallel.pipeline
    provider.context_parallel_size = parallel.context
    # a block's last position has no target: the mean of ranks' means would not weigh tokens alike
    provider.calculate_per_token_loss = parallel.context > 1
    provider.sequence_parallel = parallel.sequence
    if parallel.virtual_pipeline > 1:
        provider.virtual_pipeline_model_parallel_size = parallel.virtual_pipeline
        # with the defaults the interleaved schedule trains on wrong gradients
        provider.overlap_p2p_comm, provider.batch_p2p_comm = True, False
    if parallel.expert > 1:
        provider.expert_model_parallel_size = parallel.expert
        provider.expert_tensor_parallel_size = 1  # experts are too small to be split
    provider.seq_length = block_size
    dtype = getattr(torch, DTYPES[model.precision])
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = model.precision == "bf16", False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # Bridge only checks for TransformerEngine, but the output layer's fusion is Apex's
        provider.gradient_accumulation_fusion = False
    for name, value in model.provider.items():
        if not hasattr(provider, name):
            raise ValueError(
                f"model.provider.{name} is unknown to the installed Megatron-Bridge: leave it out."
            )
        setattr(provider, name, value)
    for stand_in in STAND_INS:
        stand_in.adapt(provider)
    return bridge, provider


def build(
    job: ModelJob, hf: str, block_size: int, terms: dict[str, float] | None = None
) -> tuple[AutoBridge, list]:
    """Builds a checkpoint's model in the layout of a job that does not train it. Collective.

    `terms` are those of `train.terms` with which it was trained, as they may have changed it.

    Returns:
        The bridge, and the model's chunks on this rank, with the checkpoint's weights.

    Raises:
        ValueError: as `model_provider`, or the checkpoint lacks weights, or an installed version
            is untested.
    """
    functions.check("scoring", "trainer")
    bridge, provider = model_provider(hf, job.parallel, job.config.model, block_size=block_size)
    make_terms(terms or {}, provider)
    provider.perform_initialization = False  # no gradient is clipped, and drawing takes seconds
    provider.finalize()
    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=job.config.seed)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


def number_text(provider: Any) -> None:
    """Makes the model number each sample's tokens from 0 on every pipeline stage.

    Vision-language models, here of text alone, derive positions, and Gemma 3 its mask, from tokens,
    which Megatron-Bridge passes only to the first stage: on others training fails, or sees ahead.
    """
    if not hasattr(provider, "vision_config"):
        return

    def set_positions(model: Any, arguments: tuple, options: dict[str, Any]) -> Any:
        positions = options.get("position_ids")
        if positions is not None and positions.dim() == 3:
            return None
        # without either, between the first and the last stage, samples are whole blocks
        known = [options.get(name) for name in ("input_ids", "labels")]
        length = next((t.shape[1] for t in known if t is not None), model.config.seq_length)
        device = next(model.parameters()).device
        positions = torch.arange(length, device=device).expand(3, 1, length)  # time, height, width
        if options.get("input_ids") is None and hasattr(model, "_compute_attention_biases"):
            options["input_ids"] = torch.zeros_like(positions[0])  # Gemma 3 masks by them
        return arguments, {**options, "position_ids": positions}

    def attach(model: list) -> list:
        for chunk in model:
            chunk.register_forward_pre_hook(set_positions, with_kwargs=True)
        return model

    provider.register_pre_wrap_hook(attach)


def _correct(provider: Any, model: list) -> list:
    """Corrects three things in a model that Bridge has built."""
    for chunk in model:  # those for images return the mask of the losses, too, at every stage
        if hasattr(chunk, "audio_tower"):  # Gemma 4's, which no setting of Bridge freezes
            chunk.freeze(False, False, False, freeze_audio_model=True, freeze_audio_projection=True)
        chunk.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
    # the epsilon of norms after a block, which stays 1e-5 in Gemma 2 and 3
    named = (pair for chunk in model for pair in chunk.named_modules())
    for norm in (module for name, module in named if name.endswith(".post_layernorm")):
        norm.eps = provider.layernorm_epsilon
    if provider.num_moe_experts != _experts(provider):  # the logs of Bridge 0.7 fail on these
        provider.num_moe_experts = None
    return model


def _check_layout(provider: Any, hf: str, parallel: Parallel) -> None:
    known = {
        "mamba": hasattr(provider, "hybrid_stack_spec") or hasattr(provider, "mamba_stack_spec"),
        "delta": getattr(provider, "experimental_attention_variant", None) == "gated_delta_net",
        "experts": _experts(provider) > 1,
        "images": hasattr(provider, "freeze_vision_model"),
        "gemma4": hasattr(provider, "per_layer_embed_dim"),
    }
    check_layers(parallel, {kind for kind, has in known.items() if has}, hf)
    heads, groups = provider.num_attention_heads, provider.num_query_groups or 0
    sizes = (
        ("pipeline", "num_hidden_layers", provider.num_layers),
        ("tensor", "num_attention_heads", heads),
        ("tensor", "num_key_value_heads", groups or heads),
        ("tensor", "vocab_size", provider.vocab_size),
        ("expert", "num_experts", _experts(provider)),
    )
    check_parallel(parallel, sizes, hf)
    world = torch.distributed.get_world_size()
    if world != parallel.world_size:
        raise ValueError(
            f"parallel.data={parallel.data} x tensor={parallel.tensor} x pipeline="
            f"{parallel.pipeline} x context={parallel.context} needs {parallel.world_size} "
            f"processes, but {world} are running."
        )


def _experts(provider: Any) -> int:
    """Returns the experts per layer; Nemotron-H configs give a number even without MoE layers."""
    patterns = (getattr(provider, f"hybrid_{kind}_pattern", None) for kind in ("layer", "override"))
    layers = next(filter(None, patterns), "E")
    return (provider.num_moe_experts or 1) if "E" in layers else 1
