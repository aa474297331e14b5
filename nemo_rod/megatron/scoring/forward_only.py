"""Keeps a scoring pass free of side effects, so that the update that follows is an ordinary one.

Each guard below answers a hazard found in Megatron's source code. Hazards without a guard are
refused before training starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from nemo_rod.upstream.changes import graphs_replay_only_in_training, old_cuda_graph_flags


def refuse_unsafe(config: Any, ddp_config: Any = None) -> None:
    """Refuses features that break a scoring pass, inside a training step or between two.

    Args:
        config: the model's configuration.
        ddp_config: the configuration of the data-parallel wrapper, if there is one.

    Raises:
        ValueError: the configuration uses such a feature; the message has the reason and the
            setting to use instead.
    """
    pipelined = (config.virtual_pipeline_model_parallel_size or 1) > 1
    overlapped = config.overlap_p2p_comm and not config.batch_p2p_comm
    lower = [name for name in ("fp8", "fp4") if getattr(config, name, None)]
    given = {name: getattr(config, f"{name}_recipe", None) for name in lower}
    recipes = {name: getattr(recipe, "value", recipe) for name, recipe in given.items()}  # or enum
    custom = [f"{name}_recipe='custom'" for name, recipe in recipes.items() if recipe == "custom"]
    # Megatron treats a negative factor as None
    drops = [
        name
        for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor")
        if (getattr(config, name, None) or 0) > 0
    ]
    balancing = getattr(config, "moe_router_load_balancing_type", None)
    sinkhorn = "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing])
    shared_buffer = bool(getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False))
    graph_impl = getattr(config, "cuda_graph_impl", "none")
    graphs = graph_impl not in (None, "none")
    eager = graph_impl == "transformer_engine" and graphs_replay_only_in_training()
    old_graphs = old_cuda_graph_flags(config)
    fsdp = bool(getattr(ddp_config, "use_megatron_fsdp", False))
    for enabled, feature, why, instead in (
        (pipelined and not overlapped, "virtual pipeline stages with these p2p settings",
         "trains on wrong gradients", "overlap_p2p_comm=True and batch_p2p_comm=False"),
        (graphs and not eager, f"cuda_graph_impl={graph_impl!r}",
         "replays graphs that were captured for training",
         "cuda_graph_impl='transformer_engine' or 'none'"),
        (bool(old_graphs) and not graphs, f"{' and '.join(old_graphs)}=True",
         "replays graphs that were captured for training", "it to False"),
        (recipes.get("fp8") == "delayed", "delayed FP8 scaling",
         "lets scoring move the scales of training", "fp8_recipe='tensorwise' or 'mxfp8'"),
        (bool(custom), " and ".join(custom),
         "has quantizers of your own, which may keep scales that scoring would move",
         "a recipe of TransformerEngine's without a history, such as 'mxfp8' or 'nvfp4'"),
        (shared_buffer, "reuse_grad_buf_for_mxfp8_param_ag",
         "leaves gradients where scoring between two steps, as for validation, reads weights",
         "reuse_grad_buf_for_mxfp8_param_ag=False"),
        (getattr(config, "moe_router_force_load_balancing", False),
         "moe_router_force_load_balancing", "scores with random routing",
         "moe_router_force_load_balancing=False"),
        (getattr(config, "moe_router_force_biased", None) is not None, "moe_router_force_biased",
         "scores with random routing", "moe_router_force_biased=None"),
        (bool(drops), " and ".join(drops),
         "drops tokens by what else is in a micro-batch, so that scores depend on their neighbours",
         f"{' and '.join(drops)}=None"),
        (sinkhorn, "moe_router_load_balancing_type='sinkhorn'",
         "routes a token by its neighbours in training and without them in scoring",
         "moe_router_load_balancing_type='aux_loss'"),
        (getattr(config, "fine_grained_activation_offloading", False),
         "fine_grained_activation_offloading", "uses up its warm-up on the scoring pass",
         "fine_grained_activation_offloading=False"),
        (getattr(config, "qk_clip", False), "qk_clip",
         "clips queries and keys by candidates that are not trained on", "qk_clip=False"),
        (getattr(config, "hybrid_context_parallel", False), "hybrid_context_parallel",
         "deals the tokens of a step by a schedule of its own", "hybrid_context_parallel=False"),
        (fsdp, "Megatron FSDP", "is not supported yet", "use_megatron_fsdp=False"),
    ):  # fmt: skip
        if enabled:
            raise ValueError(f"Selection does not work with {feature}: it {why}; set {instead}.")


def refuse_other_shapes(config: Any, *, scoring: int, training: int, is_prefix: bool) -> None:
    """Refuses micro-batches of scoring that do not fit the buffers of training's.

    Args:
        config: the model's configuration.
        scoring: blocks in a micro-batch of scoring.
        training: blocks in one of training.
        is_prefix: whether only the beginning of every block is scored.

    Raises:
        ValueError: communication overlaps with products in buffers for one shape, and the shapes
            differ.
    """
    if overlaps_tensor_parallel(config) and (is_prefix or scoring != training):
        raise ValueError(
            "Selection does not work with tp_comm_overlap if micro-batches of scoring differ from "
            "those of training: its buffers have only the shape of training's; set "
            "tp_comm_overlap=False, or scoring.micro_batch_size to train.micro_batch_size and "
            "scoring.prefix to 1."
        )


def overlaps_tensor_parallel(config: Any) -> bool:
    """Returns whether products overlap with communication, in buffers for one shape of input."""
    return bool(getattr(config, "tp_comm_overlap", False)) and config.tensor_model_parallel_size > 1


@contextmanager
def forward_only(model: list, config: Any) -> Iterator[None]:
    """Enters evaluation mode without lasting effects: no gradients, counters, timers or RNG use.

    Multi-token prediction is skipped: scores use none of its layers, logits or losses.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())  # the schedules do not apply it themselves
        modules, tracker = [m for chunk in model for m in chunk.modules()], get_cuda_rng_tracker()
        for module in modules:  # a frozen part may be in evaluation mode
            stack.callback(setattr, module, "training", module.training)
        for chunk in model:  # counters of routers and MTP depend on the mode
            stack.callback(chunk.train, chunk.training)  # some modules do more than set the flag
            chunk.eval()
        stack.callback(tracker.set_states, tracker.get_states())
        stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        # up to core 0.16, GPT models need a number of predictors even if it is 0, and hybrid ones
        # reject 0; by its name, as NVIDIA is about to delete the class
        is_gpt = any(b.__name__ == "GPTModel" for m in modules for b in type(m).__mro__)
        predictors = [module.mtp for module in modules if "mtp" in module._modules]
        # a language model inside another model has its own configuration
        configs = {id(m.config): m.config for m in modules if "mtp_process" in vars(m)}
        for each in ({id(config): config} | configs).values():
            if getattr(each, "mtp_num_layers", None):
                stack.enter_context(patching(each, "mtp_num_layers", 0 if is_gpt else None))
        for block in predictors:
            block.forward = lambda hidden_states, **_: hidden_states  # models expect no more of it
            stack.callback(delattr, block, "forward")
        for name, value in (
            ("timers", None),
            # the output layer would queue scoring's inputs for its deferred weight gradient
            ("defer_embedding_wgrad_compute", False),
            # drawn in evaluation mode, too: a block's score would differ between passes
            ("moe_input_jitter_eps", None),
        ):
            stack.enter_context(patching(config, name, value))
        for module in modules:
            # set by log_max_attention_logit since 0.19
            if "current_max_attn_logits" in vars(module):
                stack.enter_context(patching(module, "current_max_attn_logits", None))
        yield
        # gathering their weights may have begun, and no hook of theirs has waited for it
        for _, buckets in _gathered_by_hooks(model) if predictors else ():
            if buckets.param_gather_handle is not None:
                buckets.finish_param_sync(skip_next_bucket_dispatch=True)


@contextmanager
def patching(target: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value for the duration of a block."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def gather_weights(model: list, *, no_pass_follows: bool = False) -> None:
    """Gathers the weights of every replica if no forward hook will do so. Collective.

    With `overlap_param_gather` an optimizer step updates only each replica's own share of the
    weights. Hooks of the next forward pass gather the others, but trainers disable these hooks
    until their first step has ended, and where `no_pass_follows`, as before an export, none run.
    """
    for chunk, buckets in _gathered_by_hooks(model):
        if no_pass_follows or not chunk.remove_forward_pre_hook_handles:
            buckets.finish_param_sync(skip_next_bucket_dispatch=True)


def _gathered_by_hooks(model: list) -> Iterator[tuple[Any, Any]]:
    """Yields each bucket group of the chunks that overlap gathering with the forward pass."""
    for chunk in model:
        if getattr(chunk, "use_forward_hook", False):
            for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                yield chunk, buckets
