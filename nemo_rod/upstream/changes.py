"""Differences between versions of NVIDIA's packages, each under the name of the change.

Each function inspects the installed code rather than its version number, as development versions
and forks carry the number of another release.
"""

from __future__ import annotations

from typing import Any


def signal_handler_listens(handler: Any) -> bool:
    """Returns whether Bridge has installed its signal handler, as it does since 0.6.

    Installed a second time, the handler would save itself as the previous one and restore that at
    the end: signals would then be lost.
    """
    return handler.original_handler is not None


def writers_are_forked(filesystem_async: Any) -> bool:
    """Returns whether processes write a rank's files of a checkpoint (core 0.16), not threads."""
    return hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc")


def old_cuda_graph_flags(config: Any) -> list[str]:
    """Returns enabled flags that `cuda_graph_impl` has replaced since core 0.16."""
    flags = ("enable_cuda_graph", "external_cuda_graph")
    return [flag for flag in flags if getattr(config, flag, False)]


def graphs_replay_only_in_training() -> bool:
    """Returns whether graphs of TransformerEngine are left alone in evaluation mode (core 0.16)."""
    from megatron.core.transformer import module

    layer: Any = getattr(module, "GraphableMegatronModule", None)
    decides: Any = getattr(layer, "_should_call_te_cudagraph", None)
    return decides is not None and "training" in decides.__code__.co_names


def operation_counters(state: Any) -> dict[str, Any]:
    """Returns the trainer's operation counters, which Bridge's forward steps update (since 0.5)."""
    return {name: value for name, value in vars(state).items() if name.startswith("_flops_")}


def fp8_support(precision: str) -> tuple[bool, str]:
    """Returns whether TransformerEngine supports "fp8" or "mxfp8" on this GPU, and if not, why.

    Older versions have only the function that the public one calls.
    """
    from transformer_engine import pytorch as engine

    if hasattr(engine, f"is_{precision}_available"):
        return getattr(engine, f"is_{precision}_available")(return_reason=True)
    from transformer_engine.pytorch import fp8

    return getattr(fp8, f"check_{precision}_support")()


def fp8_autocast(precision: str) -> Any:
    """Returns TransformerEngine's context of "fp8" (current scaling) or "mxfp8", renamed in 2.9."""
    from transformer_engine import pytorch as engine
    from transformer_engine.common import recipe as recipes

    kinds = {"fp8": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}
    recipe = getattr(recipes, kinds[precision])(fp8_format=recipes.Format.E4M3)
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=recipe)
    return engine.fp8_autocast(enabled=True, fp8_recipe=recipe)
