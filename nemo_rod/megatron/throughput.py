"""How fast a step was, on the rank that records; no collective."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

from nemo_rod.selection import Choice
from nemo_rod.selection.competition import model_tflops


def throughput(cfg: Any, choice: Choice, seconds: float, *, scored_share: float) -> dict[str, Any]:
    """Returns `throughput/model_tflops_per_gpu` of a step.

    Args:
        cfg: Megatron-Bridge's ConfigContainer, whose own count of a block's operations is used.
        choice: the choice of the step.
        seconds: duration of the step.
        scored_share: share of every candidate that was scored, in [0, 1].
    """
    update = num_floating_point_operations(cfg, len(choice.chosen))
    tflops = model_tflops(choice, update, seconds, scored_share=scored_share)
    return {"throughput/model_tflops_per_gpu": tflops / dist.get_world_size()}
