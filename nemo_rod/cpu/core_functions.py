"""Patches for functions of megatron-core that fail without CUDA."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from nemo_rod.upstream import functions


def patch() -> None:
    """Patches random state and the routing of experts.

    Raises:
        ValueError: one of the functions differs from the tested version.
    """
    functions.check("cpu")
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    core_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )
    # fork() warns that the CPU state changed inside the GPU state's context: here they are the same
    logging.getLogger(core_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # Megatron converts expert-parallel split sizes to numpy only for CUDA tensors
    to_host = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(to_host)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return to_host(tensor, as_numpy=as_numpy, record_stream=False)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move
