"""Stand-ins for packages that some modules import without a guard."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch


def _missing(name: str) -> type:
    def init(self: Any, *_: Any, **__: Any) -> None:
        raise ImportError(f"{name} is not installed")

    return type(name.rsplit(".", 1)[-1], (torch.nn.Module,), {"__init__": init})


def _transformer_engine_stub() -> dict[str, types.ModuleType]:
    root: Any = types.ModuleType("transformer_engine")
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    root.pytorch = pytorch
    pytorch.Linear, pytorch.LayerNormLinear = _missing("te.Linear"), _missing("te.LayerNormLinear")
    pytorch.ops = types.SimpleNamespace(Sequential=_missing("te.ops.Sequential"))
    return {module.__name__: module for module in (root, pytorch)}


def _triton_stub() -> dict[str, types.ModuleType]:
    root: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")

    def decorator(function: Callable | None = None, **_: Any) -> Callable:
        return function if function is not None else (lambda inner: inner)

    root.language, language.constexpr = language, object
    root.jit = root.autotune = root.heuristics = decorator
    return {module.__name__: module for module in (root, language)}


class StubFinder:
    """Shows a stub to a few modules, only while their own body runs.

    They import TransformerEngine or triton without a guard. Every guarded
    `try: import transformer_engine` elsewhere still finds it missing.
    """

    stubs: ClassVar[dict[str, tuple[str, Callable[[], dict[str, types.ModuleType]]]]] = {
        "megatron.bridge.peft.lora_layers": ("transformer_engine", _transformer_engine_stub),
        "megatron.bridge.peft.lora": ("transformer_engine", _transformer_engine_stub),
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
            "triton",
            _triton_stub,
        ),
        "megatron.core.transformer.moe.ops.paged_stash": ("triton", _triton_stub),
        # imported by Megatron-LM's initialize.py
        "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
            "triton",
            _triton_stub,
        ),
    }

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that shall see a stub, as an import hook does."""
        package, make = cls.stubs.get(name, (None, None))
        if package is None or make is None or importlib.util.find_spec(package) is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            stubs = make()
            sys.modules.update(stubs)
            try:
                execute(module)
            finally:
                for stub in stubs:
                    sys.modules.pop(stub, None)

        cast(Any, spec.loader).exec_module = exec_module
        return spec
