"""Positions for vision-language models, which only receive text here.

By default these models derive positions from the tokens, which Megatron-Bridge passes only to the
first pipeline stage: training fails on the others.
"""

from __future__ import annotations

from typing import Any

import torch


def number_text(provider: Any) -> None:
    """Makes a provider's model number each sample's tokens from 0 on every pipeline stage."""
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
    # without either, between the first and the last stage, samples are whole blocks
    known = [options.get(name) for name in ("input_ids", "labels")]
    length = next((t.shape[1] for t in known if t is not None), model.config.seq_length)
    device = next(model.parameters()).device
    positions = torch.arange(length, device=device).expand(3, 1, length)  # time, height, width
    return arguments, {**options, "position_ids": positions}
