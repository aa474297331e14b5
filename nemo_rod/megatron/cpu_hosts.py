"""Lets the training loops of Megatron-LM and NeMo 2.x start on a machine without CUDA.

On top of `cpu.install()`, and like it: nothing of theirs is edited, and nothing happens where CUDA
is available. Call before the job's script runs. Verified with Megatron-LM at tag core_v0.16.1 and
with nemo-toolkit 2.7.3 on megatron-core 0.15.3.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from nemo_rod.megatron.cpu import while_counting_one_device


def install_megatron_lm() -> None:
    """Makes Megatron-LM's `pretrain()` work without CUDA; its checkout must be importable."""
    if torch.cuda.is_available():
        return
    from megatron.core.datasets import utils as datasets
    from megatron.legacy import fused_kernels
    from megatron.training import arguments, initialize, training

    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    initialize._set_random_seed = while_counting_one_device(initialize._set_random_seed)
    # with a device counted it makes the process groups, but also sets that device
    initialize._initialize_distributed = while_counting_one_device(
        initialize._initialize_distributed
    )
    cast(Any, torch.cuda).set_device = lambda device: None
    # asked only for whether an environment variable has to serialise CUDA's streams: it has not
    arguments.get_device_arch_version = lambda: 10
    # built by nvcc, and only for the fused softmax
    fused_kernels.load = lambda args: None
    # the wheel of megatron-core ships the compiled helper but no Makefile
    datasets.compile_helpers = lambda: None


def install_nemo2() -> None:
    """Makes NeMo 2.x's `llm.pretrain()` work without CUDA, with `Trainer(accelerator="cpu")`."""
    if torch.cuda.is_available():
        return
    _unpin_metrics()
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl
    from nemo.lightning.pytorch.callbacks import ProgressPrinter

    megatron_init._set_random_seed = while_counting_one_device(megatron_init._set_random_seed)
    # moves a loaded checkpoint's CUDA tensors to the current device, and insists that there is one
    pl._fix_tensors_device = lambda checkpoint: checkpoint
    # rank 0 alone gathers the times of all ranks' timers; where none is on this gathers nothing,
    # which NCCL skips and for which gloo waits for ever
    ProgressPrinter.log_megatron_timers = lambda self, timers: None


def _unpin_metrics() -> None:
    """NeMo logs by `torch.tensor(x, pin_memory=True).to("cuda", non_blocking=True)`."""
    make, move = torch.tensor, torch.Tensor.to

    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        target = args[0] if args else options.get("device")
        if isinstance(target, (str, torch.device)) and torch.device(target).type == "cuda":
            args, options = ("cpu", *args[1:]), {k: v for k, v in options.items() if k != "device"}
        return move(self, *args, **options)

    torch.tensor, cast(Any, torch.Tensor).to = tensor, to
