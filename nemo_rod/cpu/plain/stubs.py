"""Stubs for packages that some modules import without a guard but never use in our jobs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch

from nemo_rod.cpu.plain import kernels, layers

EXTENSION = "megatron.core.extensions.transformer_engine"  # of which all build their layers
Modules = dict[str, types.ModuleType]


class _Package(types.ModuleType):
    """A package in which every name is a class that cannot be instantiated."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def init(self: Any, *_: Any, **__: Any) -> None:
            raise ImportError(f"{package}.{name} is not installed")

        package = self.__name__
        members = {"__init__": init, "__class_getitem__": classmethod(lambda cls, _: cls)}
        return type(name, (torch.nn.Module,), members)


def _packages(*names: str) -> Modules:
    made: Modules = {name: _Package(name) for name in names}
    for name, package in made.items():
        parent, _, own_name = name.rpartition(".")
        if parent in made:
            setattr(made[parent], own_name, package)
    return made


def _triton() -> Modules:
    made: dict[str, Any] = _packages("triton", "triton.language")

    def decorator(function: Callable | None = None, **_: Any) -> Callable:
        return function if function is not None else (lambda inner: inner)

    made["triton.language"].constexpr = object
    for name in ("jit", "autotune", "heuristics"):
        setattr(made["triton"], name, decorator)
    return made


_transformer_engine = partial(
    _packages, "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops"
)
_energon = partial(
    _packages,
    "megatron.energon",
    "megatron.energon.epathlib",
    "megatron.energon.epathlib.epath",
    "megatron.energon.flavors",
    "megatron.energon.flavors.base_dataset",
    "megatron.energon.flavors.webdataset",
    "webdataset",
    "webdataset.autodecode",
)
_resiliency = partial(_packages, "nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")


class StubFinder:
    """Shows a stub to modules with an unguarded import, only while their own body runs.

    Every guarded `try: import transformer_engine` elsewhere still finds the package missing.
    Without a GPU, kernels that need one count as missing.
    """

    # module name, or prefix that ends in a dot -> the package it imports, and the stub
    stubs: ClassVar[dict[str, tuple[str, Callable[[], Modules]]]] = {
        "megatron.bridge.peft.lora": ("transformer_engine", _transformer_engine),
        "megatron.bridge.peft.lora_layers": ("transformer_engine", _transformer_engine),
        "megatron.bridge.data.energon.": ("megatron.energon", _energon),
        "megatron.bridge.models.qwen_vl.data.energon": ("megatron.energon", _energon),
        "megatron.bridge.training.pretrain": ("nvidia_resiliency_ext", _resiliency),
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": ("triton", _triton),
        "megatron.core.transformer.moe.paged_stash": ("triton", _triton),  # 0.18
        "megatron.core.transformer.moe.ops.paged_stash": ("triton", _triton),  # 0.19
        "megatron.core.ssm.gated_delta_net": ("fla", kernels.fla),
        "megatron.core.ssm.gated_delta_net.common": ("fla", kernels.fla),  # a package since 0.19
        "megatron.core.ssm.mamba_mixer": ("mamba_ssm", kernels.mamba_ssm),
        # imported by Megatron-LM's initialize.py
        "megatron.core.transformer.custom_layers.batch_invariant_kernels": ("triton", _triton),
    }
    gpu_kernels: ClassVar[set[str]] = {"fla", "mamba_ssm"}

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module that must see a stub, as an import hook does."""
        if name == EXTENSION:
            if _is_installed("transformer_engine"):
                return None

            def with_plain_layers(run: Callable[[], None]) -> None:
                run()
                layers.replace(sys.modules[name])

            return _executed_by(name, path, target, with_plain_layers)
        folder = name.rpartition(".")[0] + "."
        package, make = cls.stubs.get(name) or cls.stubs.get(folder) or ("", dict)
        runs = package not in cls.gpu_kernels or torch.cuda.is_available()
        if not package or (runs and _is_installed(package)):
            return None

        def with_stubs(run: Callable[[], None]) -> None:
            stubs = make()
            before = {name: sys.modules[name] for name in stubs if name in sys.modules}
            sys.modules.update(stubs)
            try:
                run()
            finally:
                for stub in stubs:
                    sys.modules.pop(stub, None)
                sys.modules.update(before)

        return _executed_by(name, path, target, with_stubs)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is missing, or it is an active stub
        return False


def _executed_by(
    name: str, path: Any, target: Any, execute: Callable[[Callable[[], None]], None]
) -> Any:
    """Returns the spec of an installed module whose body `execute` will run."""
    spec = importlib.machinery.PathFinder.find_spec(name, path, target)
    if spec is None or spec.loader is None:
        return None
    run = spec.loader.exec_module
    cast(Any, spec.loader).exec_module = lambda module: execute(lambda: run(module))
    return spec
