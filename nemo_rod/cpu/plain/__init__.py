"""Runs Megatron without TransformerEngine and the packages that accompany it.

    stubs.py        stubs for packages that some modules import without a guard
    core.py         functions of megatron-core that fail without TransformerEngine or Apex
    layers.py       plain torch layers for models that Megatron builds of TransformerEngine's
    kernels.py      plain torch for the kernels of flash-linear-attention and mamba_ssm
    conversion.py   names of experts, which are separate modules without TransformerEngine

"No CUDA" (`cpu/`) and "no TransformerEngine" are independent: a GPU with only PyTorch needs this
package but not the other. None of NVIDIA's files are edited, and nothing is replaced if
TransformerEngine is installed and there is a GPU: without one its layers cannot run, and it counts
as missing. The layers and kernels here are slow stand-ins: they compute the same as the originals,
as `tests/megatron/test_architectures.py` shows against Hugging Face's code, but no test has
compared them with the originals.

Call `prepare()` before the first `import megatron.bridge` and `patch()` after `cpu.install()`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any, cast

import torch

from nemo_rod.cpu.plain import core, layers
from nemo_rod.cpu.plain.stubs import EXTENSION, StubFinder

_ENGINE = ("transformer_engine", "transformer_engine_torch")


@functools.cache
def is_needed() -> bool:
    """Returns whether TransformerEngine is missing, or has no GPU."""
    return importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()


def prepare() -> None:
    """Makes `import megatron.core` and `import megatron.bridge` work. Idempotent."""
    if is_needed():
        for name in _ENGINE:
            if name not in sys.modules and importlib.util.find_spec(name) is not None:
                cast(Any, sys.modules)[name] = None  # nothing, to `import` and `find_spec` alike
    if StubFinder not in sys.meta_path:
        sys.meta_path.insert(0, StubFinder)
        # a program may have imported megatron-core before
        if is_needed() and (extension := sys.modules.get(EXTENSION)) is not None:
            layers.replace(extension)


@functools.cache
def patch() -> None:
    """Imports megatron-core and patches functions that need TransformerEngine. Idempotent."""
    if is_needed():
        core.patch()
