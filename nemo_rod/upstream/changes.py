"""What differs between versions of NVIDIA's packages, each under the name of the change.

Each function looks at what is there and never at a version number: development versions and forks
carry the number of another release.
"""

from __future__ import annotations

import inspect
from typing import Any


def experts_are_numbered_by_bridge() -> bool:
    """Whether Bridge numbers experts that are modules of their own over all ranks (since 0.5).

    It always did so for those in TransformerEngine's layout.
    """
    from megatron.bridge.models.conversion import model_bridge

    function: Any = inspect.unwrap(model_bridge._megatron_local_name_to_global)
    constants = function.__code__.co_consts
    return any("local_experts" in text for text in constants if isinstance(text, str))


def signal_handler_listens(handler: Any) -> bool:
    """Whether Bridge has installed its signal handler itself (since 0.6); before, it only made it.

    Installed a second time it would take itself for what was there before, and put that back in the
    end: a signal would then be swallowed.
    """
    return handler.original_handler is not None


def router_kernel_is_undefined(moe_utils: Any) -> bool:
    """Whether routers ask for a kernel that has no name without TransformerEngine (core 0.16)."""
    return not hasattr(moe_utils, "te_general_gemm")


def old_cuda_graph_flags(config: Any) -> list[str]:
    """Flags that are on and that `cuda_graph_impl` has replaced since core 0.16."""
    flags = ("enable_cuda_graph", "external_cuda_graph")
    return [flag for flag in flags if getattr(config, flag, False)]


def operation_counters(state: Any) -> dict[str, Any]:
    """Operations that Bridge's forward steps count up in the trainer's state (since 0.5)."""
    return {name: value for name, value in vars(state).items() if name.startswith("_flops_")}
