"""Patches for functions of megatron-core that fail without TransformerEngine or Apex."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from nemo_rod.cpu.plain import layers
from nemo_rod.upstream import functions


def patch() -> None:
    """Patches experts, norms and the distributed optimizer.

    Raises:
        ValueError: one of the functions differs from the tested version.
    """
    functions.check("plain")
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # the kernel of routers, in core 0.16
        moe_utils.te_general_gemm = None
    _mark_norms()
    _mend_loading_of_distributed_optimizer()


def _mark_norms() -> None:
    """Marks the parameters of Megatron's torch norms, which otherwise refuse sequence parallelism.

    The mark makes the trainer sum their gradients over the tensor-parallel processes.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make: Callable = WrappedTorchNorm.__new__

    @functools.wraps(make)
    def make_marked(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma:  # torch's norms do not have it
            return layers.Norm(config, hidden_size, eps)
        split, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(cls, config, hidden_size, eps, *args, **kwargs)
        finally:
            config.sequence_parallel = split
        for parameter in norm.parameters():
            parameter.sequence_parallel = split
        return norm

    cast(Any, WrappedTorchNorm).__new__ = staticmethod(make_marked)


def _mend_loading_of_distributed_optimizer() -> None:
    """Makes a distributed optimizer loadable before its first step, which otherwise needs Apex.

    Loading would also lose Adam's step count: the per-parameter counts are not loaded, and
    the global count would become one shared tensor, advanced once per parameter.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    describe = DistributedOptimizer.sharded_state_dict
    load = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(describe)
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: dict,
        is_loading: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> dict:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return describe(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: dict) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    @functools.wraps(set_states)
    def set_states_but_step(self: Any, model_param: Any, tensors: dict) -> None:
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state.get(parameter, {}).get("step")
        set_states(self, model_param, tensors if step is None else {**tensors, "step": step})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
