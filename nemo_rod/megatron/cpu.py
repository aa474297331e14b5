"""Run megatron-core and Megatron-Bridge on a machine without CUDA.

Nothing of theirs is edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this module behaves differently with it; the exceptions
say so. `torch.cuda.is_available()` stays False. Verified with megatron-core 0.16.1 and
Megatron-Bridge 0.3.1, and with megatron-core 0.15.3 under NeMo 2.7.3 (`cpu_hosts.py`).

Call `install()` before the first `import megatron.core`, and `install_trainer()` before converting
a checkpoint or calling `pretrain()`. Both do nothing where CUDA is available.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

_CPU = torch.device("cpu")


def install() -> None:
    """Make `import megatron.core` and `import megatron.bridge` work without CUDA. Idempotent."""
    if torch.cuda.is_available() or _StubFinder in sys.meta_path:
        return
    # megatron/core/jit.py compiles at import time; its own switch comes too late
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _redirect_devices()
    _redirect_random_state()
    sys.meta_path.insert(0, _StubFinder)
    _densify_gloo_scatter()
    _patch_core()


@functools.cache
def install_trainer() -> None:
    """Let Megatron-Bridge convert checkpoints and initialise its `pretrain()` without CUDA."""
    if torch.cuda.is_available():
        return
    from megatron.bridge.training import initialize, setup

    setup.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    initialize._set_random_seed = while_counting_one_device(initialize._set_random_seed)
    _name_experts_globally()
    # the wheel ships the compiled helper but no Makefile: running `make` would exit the process
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        initialize.compile_helpers = lambda: None


def _name_experts_globally() -> None:
    """Bridge numbers the experts of an expert-parallel rank only in TransformerEngine's layout.

    Without TransformerEngine experts are modules of their own. Left alone, every rank would load
    the weights of the first rank's experts, silently, and none could be exported.
    """
    from megatron.bridge.models.conversion import model_bridge

    to_global = model_bridge._megatron_local_name_to_global
    own_module = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)")

    def name(models: Any, config: Any, param_name: str, vp_stage: int | None = None) -> str:
        return to_global(models, config, own_module.sub(r"experts.\2\1", param_name), vp_stage)

    model_bridge._megatron_local_name_to_global = name


def while_counting_one_device(function: Callable) -> Callable:
    """Wraps a function of a trainer that skips its work where it counts no device.

    Such are the seeding of the model-parallel random state and, in Megatron-LM, the making of the
    process groups.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        real, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.device_count = real

    return wrapper


class _Stream:
    """A stream or event that is always done: on CPU everything is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _TypeName(str):
    """'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor'.

    The gradient clipping and the distributed optimizer compare these names.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _redirect_devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    stream = _Stream()
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda _: _Stream()

    def on_cpu(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.device(kwargs.get("device") or _CPU).type == "cuda":
                kwargs["device"] = _CPU
            return function(*args, **kwargs)

        return wrapper

    makers = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "empty_like")
    for name in makers:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor, module = cast(Any, torch.Tensor), cast(Any, torch.nn.Module)
    tensor.cuda = lambda self, *_, **__: self
    module.cuda = lambda self, *_, **__: self

    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = tensor_type(self, *args, **kwargs)
        return _TypeName(out) if isinstance(out, str) else out

    tensor.type = type_name


def _redirect_random_state() -> None:
    """CUDA's generator becomes the CPU default generator, the one dropout draws from."""
    cuda: Any = torch.cuda

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(
        state
    )


def _patch_core() -> None:
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    core_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )
    # fork() warns that the CPU state changed inside the GPU state's context: here they are one
    logging.getLogger(core_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # 0.16.1 names it without defining it where TransformerEngine is absent
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # expert-parallel split sizes are turned into numpy only for CUDA tensors
    to_host = moe_utils.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return to_host(tensor, as_numpy=as_numpy, record_stream=False)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move
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


def _densify_gloo_scatter() -> None:
    """Gloo scatters strided chunks as if they were dense, silently.

    Bridge's tensor-parallel weight loading passes strided chunks and relies on the copy to the
    device to make them dense. Contiguous inputs are passed on unchanged.
    """
    import torch.distributed as dist

    scatter = dist.scatter

    def dense_scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [chunk.contiguous() for chunk in scatter_list]
        return scatter(tensor, scatter_list, *args, **kwargs)

    dist.scatter = dense_scatter


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


class _StubFinder:
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
        # imported by Megatron-LM's initialize.py
        "megatron.core.transformer.custom_layers.batch_invariant_kernels": (
            "triton",
            _triton_stub,
        ),
    }

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
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
