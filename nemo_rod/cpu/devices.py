"""Redirects to the CPU those PyTorch functions that can only raise without CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


class _Stream:
    """A stream or event that is always complete: on CPU everything is synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _TypeName(str):
    """A 'torch.FloatTensor' that also equals 'torch.cuda.FloatTensor'.

    Gradient clipping and the distributed optimizer compare these names.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def redirect() -> None:
    """Redirects devices, streams, tensor types and random state to the CPU, and patches gloo.

    Dropout then draws from the CPU's default generator.
    """
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
            device = kwargs.get("device")  # 0 is a GPU, too
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = _CPU
            return function(*args, **kwargs)

        return wrapper

    # `with torch.device(...)` identifies torch's constructors by identity and caches them at its
    # first use. It must cache the originals: otherwise transformers 5 leaves rotary
    # frequencies uninitialised.
    _device_constructors()
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

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(
        state
    )
    _densify_gloo_scatter()


def _densify_gloo_scatter() -> None:
    """Makes chunks contiguous before gloo's scatter, which treats strided ones as dense.

    Bridge's tensor-parallel weight loading passes strided chunks and relies on the copy to the
    device to make them dense. Contiguous inputs are passed on unchanged.
    """
    scatter = dist.scatter

    def dense_scatter(tensor: Any, scatter_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [chunk.contiguous() for chunk in scatter_list]
        return scatter(tensor, scatter_list, *args, **kwargs)

    dist.scatter = dense_scatter
