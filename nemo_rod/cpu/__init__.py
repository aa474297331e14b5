"""NVIDIA's stack without CUDA and, in `plain/`, without TransformerEngine.

    devices.py   redirects torch.cuda to the CPU
    trainers.py  patches Megatron-Bridge and Megatron-LM
    on_cpu.py    runs a host's unmodified script
    forks.py     starts a run's programs without importing all of it anew
    plain/       plain torch instead of TransformerEngine's layers and kernels

None of NVIDIA's files are edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this package behaves differently with it; exceptions are
documented where they occur. `torch.cuda.is_available()` stays False. The tested versions are listed
in docs/support.md. With CUDA and TransformerEngine nothing is replaced except the build of a helper
that megatron-core's wheel ships without its Makefile.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from nemo_rod.upstream import functions

if TYPE_CHECKING:
    from nemo_rod.config import Config
    from nemo_rod.run.handover import Stage


def is_needed() -> bool:
    """Returns whether CUDA is unavailable."""
    import torch

    return not torch.cuda.is_available()


@functools.cache
def install() -> None:
    """Makes megatron-core and code that uses it work without CUDA. Idempotent.

    Raises:
        ValueError: a function of megatron-core differs from the tested version.
    """
    import torch

    from nemo_rod.cpu import devices

    if not is_needed():
        return
    # megatron/core/jit.py compiles at import time, before its own switch can be set
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    devices.redirect()
    functions.check("cpu")
    from megatron.core.tensor_parallel import random as core_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    core_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )
    # fork() warns that the CPU state changed inside the GPU state's context: here they are the same
    logging.getLogger(core_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # Megatron converts expert-parallel split sizes to numpy only for CUDA tensors
    to_host = moe_utils.maybe_move_tensor_to_cpu

    @functools.wraps(to_host)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return to_host(tensor, as_numpy=as_numpy, record_stream=False)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move


def prepare() -> None:
    """Makes `import megatron.core` and `import megatron.bridge` work. Idempotent.

    Importing `nemo_rod.megatron` calls it.
    """
    from nemo_rod.cpu import plain

    plain.prepare()
    install()
    plain.patch()


def prepare_bridge() -> None:
    """Makes Megatron-Bridge convert checkpoints and train. Idempotent."""
    from nemo_rod.cpu import plain, trainers
    from nemo_rod.cpu.plain import conversion

    trainers.install_megatron_bridge()
    if plain.is_needed():
        conversion.convert_experts_as_modules()


def check_layout(config: Config, stages: Sequence[Stage]) -> str:
    """Refuses stages whose attention Megatron only has by TransformerEngine, on a GPU."""
    from nemo_rod.run.launch import launcher_of
    from nemo_rod.run.processes.pythons import num_gpus

    launcher, context = launcher_of(config), config.parallel.context
    is_here = launcher.environment and not launcher.submits
    if context > 1 and is_here and any(s.runs_model for s in stages) and not num_gpus():
        raise OSError(
            f"parallel.context={context} needs a GPU, as Megatron divides a block's positions by "
            "TransformerEngine alone, and torch sees none here: set parallel.context=1."
        )
    return ""


def adapt(provider: Any) -> None:
    """Changes a model provider of Megatron-Bridge to one that can be built and trained here."""
    from nemo_rod.cpu import plain
    from nemo_rod.cpu.plain import layers

    if plain.is_needed():
        layers.use(provider)
        if adapters := sys.modules.get("megatron.bridge.peft.utils"):
            cast(Any, adapters).HAVE_TE = False  # it takes names that core leaves empty for classes
    if is_needed():
        # the interleaved schedule may free an output that gloo is still sending
        provider.deallocate_pipeline_outputs = False
        if gemma := sys.modules.get("megatron.bridge.models.gemma.gemma2_provider"):
            cast(Any, gemma)._HAVE_FLEX_ATTN = False  # flex attention has no backward pass on CPU
