"""The objective: only the language model is trained, and only by the loss of the next token.

Megatron-Bridge turns on the balancing losses of routers and the loss of multi-token prediction
wherever a checkpoint's config mentions them. Neither is part of the paper's objective, and both
would confound a comparison of arms. A vision tower, which text never reaches, would have no
gradient but would still decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.moe.router import Router

from nemo_rod.ranks import all_or_none

_PREDICTORS_FOLLOW = "/"  # separates layers from predictors in a hybrid model's pattern
_TOWERS = ("vision", "audio", "multi_modal")  # in the names of what text never reaches
_PROVIDER = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    # hybrid models derive the number of predictors from their pattern
    "mtp_hybrid_override_pattern": None,
    "mtp_use_repeated_layer": False,
    "keep_mtp_spec_in_bf16": False,
    # Megatron-Bridge freezes it in Qwen3-VL's models with experts: nothing would be trained
    "freeze_language_model": False,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
}


def next_token_alone(provider: Any) -> None:
    """Turns off every other loss in a Megatron-Bridge provider, and freezes its vision tower."""
    for name, value in _PROVIDER.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    if pattern := getattr(provider, "hybrid_layer_pattern", None):
        provider.hybrid_layer_pattern = pattern.split(_PREDICTORS_FOLLOW)[0]


def refuse_other_losses(model: list) -> list:
    """Refuses chunks of a model that would also be trained by another loss. Collective.

    Returns:
        The chunks, as Megatron-Bridge requires of a hook that runs before they are wrapped.

    Raises:
        ValueError: a rank has such a loss or part; raised on every rank, about the first one.
    """

    def check() -> None:
        for loss, cure in (pair for chunk in model for pair in _other_losses(chunk)):
            raise ValueError(
                f"The model would also be trained by {loss}, which is not part of the loss that "
                f"selection and its references use: {cure}."
            )

    all_or_none(check)
    return model


def _other_losses(chunk: Any) -> Iterator[tuple[str, str]]:
    """Yields every other loss or trained part, and the way to turn it off."""
    for name, module in chunk.named_modules():
        if isinstance(module, Router):
            config, cure = module.config, "set moe_router_load_balancing_type=none, without z loss"
            kinds, sizes = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
            kinds = kinds if isinstance(kinds, list) else [kinds]
            sizes = sizes if isinstance(sizes, list) else [sizes] * len(kinds)
            for kind, size in zip(kinds, sizes, strict=True):
                if "aux_loss" in str(kind) and size:
                    yield f"{kind} of {name}", cure
            if config.moe_z_loss_coeff:
                yield f"z_loss of {name}", cure
        if "mtp" in module._modules and getattr(module.config, "mtp_num_layers", None):
            yield f"multi-token prediction in {name or 'the model'}", "set mtp_num_layers=null"
        # without its loss, the indexer of sparse attention would have no gradient, and would decay
        if module._modules.get("indexer") is not None:
            cure = "choose a model without sparse attention"
            yield f"the loss of the sparse attention's indexer in {name}", cure
    for name, parameter in chunk.named_parameters():
        if any(word in name for word in _TOWERS) and parameter.requires_grad:
            cure = "set freeze_vision_model=true and freeze_vision_projection=true"
            if "audio" in name:
                cure = "no setting of Megatron-Bridge freezes it, choose a model without sound"
            yield f"the weight decay of {name}", cure
