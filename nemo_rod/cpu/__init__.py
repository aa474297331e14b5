"""Runs megatron-core and the trainers built on it on a machine without CUDA.

    devices.py         redirects torch.cuda to the CPU
    core_functions.py  patches megatron-core
    trainers.py        patches Megatron-Bridge, Megatron-LM and NeMo 2.x

None of their files are edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this package behaves differently with it; exceptions are
documented where they occur. `torch.cuda.is_available()` stays False. Other missing packages, above
all TransformerEngine, are handled by `plain/`. The tested versions are listed in docs/support.md.

Importing `nemo_rod.megatron` calls `install()`; call the trainer's function in `trainers.py` before
its job starts. With CUDA nothing is replaced, but for the build of a helper that megatron-core's
wheel ships without its Makefile.
"""

from __future__ import annotations

import functools
import os

import torch

from nemo_rod.cpu import core_functions, devices


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
