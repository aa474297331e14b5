"""Functions of megatron-core that need TransformerEngine or Apex, and fail without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch


def patch() -> None:
    """Mends experts, norms and the distributed optimizer."""
    from megatron.core.transformer.moe import moe_utils

    # 0.16.1 names it without defining it where TransformerEngine is absent
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _mark_norms()
    _mend_loading_of_distributed_optimizer()


def _mark_norms() -> None:
    """Megatron's torch norms refuse sequence parallelism, for nobody marks their parameters.

    The mark makes the trainer add up their gradients over the tensor-parallel processes.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make: Callable = WrappedTorchNorm.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        split, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = split
        for parameter in norm.parameters():
            parameter.sequence_parallel = split
        return norm

    cast(Any, WrappedTorchNorm).__new__ = staticmethod(make_marked)


def _mend_loading_of_distributed_optimizer() -> None:
    """Without Apex a distributed optimizer cannot be loaded before its first step.

    And if it could, Adam's step count would be lost, silently: that of each parameter is not among
    what is loaded, and that of the whole would become one tensor, advanced once per parameter.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    describe = DistributedOptimizer.sharded_state_dict
    load = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict(
        self: Any, weights: dict, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> dict:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return describe(self, weights, is_loading, *args, **kwargs)

    def load_state_dict(self: Any, state_dict: dict) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def set_states_but_step(self: Any, model_param: Any, tensors: dict) -> None:
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        step = self.optimizer.state.get(parameter, {}).get("step")
        set_states(self, model_param, tensors if step is None else {**tensors, "step": step})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.sharded_state_dict = sharded_state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
