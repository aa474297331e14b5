"""Makes Megatron-Bridge and Megatron-LM start on a machine without CUDA.

These functions build on `cpu.install()`; call them before the job starts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import datasets

from nemo_rod.upstream import functions


@functools.cache
def install_megatron_bridge() -> None:
    """Makes Megatron-Bridge's checkpoint conversion and `pretrain()` work without CUDA.

    With CUDA, too, the helper of megatron-core's wheel is used as it is.
    """
    from megatron.bridge.training import initialize, setup

    functions.check("cpu/megatron_bridge")
    # the wheel ships the compiled helper but no Makefile: calling `make` would end the process
    makefile = Path(datasets.__path__[0], "Makefile")
    if not makefile.exists() and importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        initialize.compile_helpers = lambda: None
    if torch.cuda.is_available():
        return

    @functools.wraps(setup.initialize_megatron)
    def initialize_megatron(cfg: Any, **options: Any) -> Any:
        _refuse_async(cfg.checkpoint.async_save, "cfg.checkpoint.async_save=True")
        return initialize.initialize_megatron(cfg, **{**options, "allow_no_cuda": True})

    setup.initialize_megatron = initialize_megatron
    initialize._set_random_seed = _while_counting_one_device(initialize._set_random_seed)


def _refuse_async(is_asked_for: bool, key: str) -> None:
    """Refuses megatron-core's saving in the background: its writer divides by the number of GPUs.

    The job would wait for that process for ever.
    """
    if is_asked_for:
        raise ValueError(f"{key} hangs on a machine without a GPU: leave it out")


def install_megatron_lm() -> None:
    """Makes Megatron-LM's `pretrain()` work without CUDA; its checkout must be importable."""
    if torch.cuda.is_available():
        return
    from megatron.training import arguments, global_vars, initialize, training

    functions.check("cpu/megatron_lm")

    def initialize_megatron(*given: Any, **options: Any) -> Any:
        done = initialize.initialize_megatron(*given, **{**options, "allow_no_cuda": True})
        _refuse_async(global_vars.get_args().async_save, "--async-save")
        return done

    training.initialize_megatron = initialize_megatron
    initialize._set_random_seed = _while_counting_one_device(initialize._set_random_seed)
    # if it counts a device it creates the process groups, but also sets that device
    initialize._initialize_distributed = _while_counting_one_device(
        initialize._initialize_distributed
    )
    cast(Any, torch.cuda).set_device = lambda device: None
    # only used to decide whether an environment variable must serialise CUDA streams: it need not
    arguments.get_device_arch_version = lambda: 10
    with suppress(ImportError):  # older versions build kernels with nvcc, only for fused softmax
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    use_installed_helper()


def use_installed_helper() -> None:
    """Makes a checkout's megatron-core use the compiled helper of the installed one.

    The helper depends on neither PyTorch nor Megatron and is the same in all tested versions.
    Without it, Megatron-LM runs `make` in the checkout.
    """
    from megatron.core.datasets import utils

    helper = "megatron.core.datasets.helpers_cpp"
    if not importlib.util.find_spec(helper):
        for wheel in importlib.metadata.distributions(name="megatron-core"):
            datasets.__path__.append(str(wheel.locate_file("megatron/core/datasets")))
    if importlib.util.find_spec(helper):
        utils.compile_helpers = lambda: None


def _while_counting_one_device(function: Callable) -> Callable:
    """Wraps a trainer's function that skips its work if it counts no device.

    Examples are seeding the model-parallel random state and, in Megatron-LM, creating the process
    groups.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        real, torch.cuda.device_count = torch.cuda.device_count, lambda: 1
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.device_count = real

    return wrapper
