"""The stand-in for CUDA and TransformerEngine under NeMo-RL's own Megatron worker.

It goes beyond `nemo_rod.megatron`'s by what only that worker calls. Everything replaced here can
only raise on a PyTorch without CUDA, asks about a GPU, or names the network of GPUs (NCCL), whose
place gloo takes; providers of models get the plain layers that they get on our own road. None of
NeMo-RL's functions is replaced.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist


def install() -> None:
    """Replaces what the worker's process calls. Idempotent."""
    import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA

    if getattr(torch.cuda, "_stands_for", None) == "cpu":
        return
    torch.cuda._stands_for = "cpu"
    start_megatron_bridge()
    _gloo_for_nccl()
    _stay_on_the_cpu()
    _answer_for_a_gpu()
    build_of_plain_layers()


def start_megatron_bridge() -> None:
    """Makes what sets Bridge up work without CUDA, under the name by which NeMo-RL imports it."""
    from megatron.bridge.training import initialize

    from nemo_rod.cpu import trainers

    trainers.use_installed_helper()  # a checkout has none, and would build it
    trainers.install_megatron_bridge()
    initialize.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    # it creates the process groups with any device, or with gloo, which NeMo-RL cannot choose
    initialize._initialize_distributed = trainers._while_counting_one_device(
        initialize._initialize_distributed
    )


def build_of_plain_layers() -> None:
    """Converts and builds models without TransformerEngine, as `nemo_rod.megatron.models` does."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models import model_provider

    from nemo_rod.cpu.plain import conversion, layers

    conversion.convert_experts_as_modules()
    describe = AutoBridge.to_megatron_provider

    @functools.wraps(describe)
    def plain(*args: Any, **options: Any) -> Any:
        provider = describe(*args, **options)
        layers.use(provider)  # before it is finalised, which refuses TransformerEngine's fusions
        return provider

    AutoBridge.to_megatron_provider = plain
    build = model_provider.get_model

    @functools.wraps(build)
    def build_plain(provider: Any, *args: Any, **options: Any) -> Any:
        layers.use(provider)  # read from the files of a conversion, it was not described above
        return build(provider, *args, **options)

    model_provider.get_model = build_plain


def _gloo_for_nccl() -> None:
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _with_gloo(getattr(dist, name)))


def _with_gloo(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and args[0] == "nccl":
            args = ("gloo", *args[1:])
        if options.get("backend") == "nccl":
            options["backend"] = "gloo"
        return function(*args, **options)

    return wrapper


def _stay_on_the_cpu() -> None:
    """`.to("cuda")` keeps a tensor or a module where it is."""
    torch.Tensor.to = _without_device(torch.Tensor.to)
    torch.nn.Module.to = _without_device(torch.nn.Module.to)


def _without_device(to: Callable) -> Callable:
    @functools.wraps(to)
    def stay(self: Any, *args: Any, **options: Any) -> Any:
        if args and (isinstance(args[0], int) or str(args[0]).startswith("cuda")):
            args = args[1:]
        device = options.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            del options["device"]
        return to(self, *args, **options) if args or options else self

    return stay


class _Numbered(str):
    """The CPU, as torch reads it; later versions compare it with the number that Ray gave them."""

    number: int

    def __new__(cls, number: int) -> Self:
        self = super().__new__(cls, "cpu")
        self.number = number
        return self

    def __eq__(self, other: object) -> bool:
        return other in ("cpu", self.number)

    __hash__ = str.__hash__


def _answer_for_a_gpu() -> None:
    cuda: Any = torch.cuda
    cuda.get_device_name = lambda *_: "cpu"

    def set_device(number: int) -> None:
        cuda.current_device = lambda: _Numbered(number)

    cuda.set_device = set_device
    import ray

    ray.get_gpu_ids = lambda: [int(os.environ.get("LOCAL_RANK", "0"))]
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *_: 0)
