"""Run megatron-core and the trainers built on it on a machine without CUDA.

    devices.py   torch.cuda means the CPU
    stubs.py     stand-ins for TransformerEngine and triton
    core.py      megatron-core
    trainers.py  Megatron-Bridge, Megatron-LM and NeMo 2.x

Nothing of theirs is edited. Nearly every function replaced here can only raise on a PyTorch
without CUDA, so nothing that works without this package behaves differently with it; the exceptions
say so. `torch.cuda.is_available()` stays False. Verified with megatron-core 0.16.1 and
Megatron-Bridge 0.3.1, with Megatron-LM at tag core_v0.16.1, and with nemo-toolkit 2.7.3 on
megatron-core 0.15.3.

Call `install()` before the first `import megatron.core`, and the trainer's own function of
`trainers.py` before its job starts. All do nothing where CUDA is available.
"""

from __future__ import annotations

import os
import sys

import torch

from nemo_rod.megatron.cpu import devices
from nemo_rod.megatron.cpu.stubs import StubFinder


def install() -> None:
    """Make `import megatron.core` and `import megatron.bridge` work without CUDA. Idempotent."""
    if torch.cuda.is_available() or StubFinder in sys.meta_path:
        return
    # megatron/core/jit.py compiles at import time; its own switch comes too late
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    devices.redirect()
    sys.meta_path.insert(0, StubFinder)
    from nemo_rod.megatron.cpu import core  # imports megatron.core, so not earlier

    core.patch()
