"""NVIDIA's stack without CUDA and, in `plain/`, without TransformerEngine.

    devices.py         redirects torch.cuda to the CPU
    core_functions.py  patches megatron-core
    trainers.py        patches Megatron-Bridge, Megatron-LM and NeMo 2.x
    on_cpu.py          runs a host's unmodified script
    plain/             plain torch in the place of TransformerEngine's layers and kernels

None of NVIDIA's files are edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this package behaves differently with it; exceptions are
documented where they occur. `torch.cuda.is_available()` stays False. The tested versions are listed
in docs/support.md. With CUDA and TransformerEngine nothing is replaced, but for the build of a
helper that megatron-core's wheel ships without its Makefile.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from nemo_rod.cpu import core_functions, devices, plain


def needed() -> bool:
    """Returns whether CUDA is unavailable."""
    return not torch.cuda.is_available()


@functools.cache
def install() -> None:
    """Makes megatron-core and code that uses it work without CUDA. Idempotent."""
    if not needed():
        return
    # megatron/core/jit.py compiles at import time, before its own switch can be set
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    devices.redirect()
    core_functions.patch()


def prepare() -> None:
    """Makes `import megatron.core` and `import megatron.bridge` work. Idempotent.

    Importing `nemo_rod.megatron` calls it.
    """
    plain.prepare()
    install()
    plain.patch()


def prepare_bridge() -> None:
    """Makes Megatron-Bridge convert checkpoints and train. Idempotent."""
    from nemo_rod.cpu import trainers
    from nemo_rod.cpu.plain import conversion

    trainers.install_megatron_bridge()
    if plain.needed():
        conversion.convert_experts_as_modules()


def adapt(provider: Any) -> None:
    """Changes a model provider of Megatron-Bridge to one that can be built and trained here."""
    from nemo_rod.cpu.plain import layers

    if plain.needed():
        layers.use(provider)
    if needed():
        # the interleaved schedule may free an output that gloo is still sending
        provider.deallocate_pipeline_outputs = False
