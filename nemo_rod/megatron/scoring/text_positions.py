"""Positions for models of images and text, which are given text alone here.

Left to themselves they count positions from the tokens, which Megatron-Bridge hands to the first
pipeline stage alone: training stops on the others.
"""

from __future__ import annotations

from typing import Any

import torch


def number_text(provider: Any) -> None:
    """Lets a provider's model number the tokens of every sample from 0, on every pipeline stage."""
    if not hasattr(provider, "vision_config"):
        return

    def attach(model: list) -> list:
        for chunk in model:
            chunk.register_forward_pre_hook(_give_positions, with_kwargs=True)
        return model

    provider.register_pre_wrap_hook(attach)


def _give_positions(model: Any, arguments: tuple, options: dict[str, Any]) -> Any:
    given = options.get("position_ids")
    if given is not None and given.dim() == 3:
        return None
    # whole blocks where there is neither: between the first stage and the last
    known = [options.get(name) for name in ("input_ids", "labels")]
    length = next((t.shape[1] for t in known if t is not None), model.config.seq_length)
    device = next(model.parameters()).device
    positions = torch.arange(length, device=device).expand(3, 1, length)  # time, height, width
    return arguments, {**options, "position_ids": positions}
