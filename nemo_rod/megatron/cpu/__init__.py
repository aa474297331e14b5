"""Run megatron-core and the trainers built on it on a machine without CUDA.

    devices.py   torch.cuda means the CPU
    core.py      megatron-core
    trainers.py  Megatron-Bridge, Megatron-LM and NeMo 2.x

Nothing of theirs is edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this package behaves differently with it; the exceptions
say so. `torch.cuda.is_available()` stays False. What is missing besides CUDA, above all
TransformerEngine, is the business of `plain/`. Which versions were run is in docs/support.md.

Importing `nemo_rod.megatron` calls `install()`; call the trainer's own function of `trainers.py`
before its job starts. All do nothing where CUDA is available.
"""

from __future__ import annotations

import functools
import os

import torch

from nemo_rod.megatron.cpu import devices


def needed() -> bool:
    """Whether there is no CUDA."""
    return not torch.cuda.is_available()


@functools.cache
def install() -> None:
    """Makes `import megatron.core` and what uses it work without CUDA. Idempotent."""
    if not needed():
        return
    # megatron/core/jit.py compiles at import time; its own switch comes too late
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    devices.redirect()
    from nemo_rod.megatron.cpu import core_functions

    core_functions.patch()
