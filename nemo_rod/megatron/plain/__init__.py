"""Run Megatron where TransformerEngine, and what comes with it, is not installed.

    stubs.py        names that some modules import without a guard
    core.py         functions of megatron-core that fail without TransformerEngine or Apex
    layers.py       layers of plain torch, for models that Megatron builds of TransformerEngine's
    kernels.py      plain torch for the kernels of flash-linear-attention and mamba_ssm
    conversion.py   the names of experts, which are modules of their own without TransformerEngine

"No CUDA" (`cpu/`) and "no TransformerEngine" are two facts: a GPU with PyTorch alone needs this
package and not the other. Nothing of NVIDIA's is edited, and where TransformerEngine is installed
nothing is replaced. The layers and kernels here are slow stand-ins: they compute what the originals
compute, as `tests/test_architectures.py` shows against Hugging Face's code, and no test has held
them against the originals.

Call `prepare()` before the first `import megatron.core` and `patch()` after `cpu.install()`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys

from nemo_rod.megatron.plain.stubs import StubFinder


@functools.cache
def needed() -> bool:
    """Whether TransformerEngine is missing."""
    return importlib.util.find_spec("transformer_engine") is None


def prepare() -> None:
    """Makes `import megatron.core` and `import megatron.bridge` work. Idempotent."""
    if StubFinder not in sys.meta_path:
        sys.meta_path.insert(0, StubFinder)


@functools.cache
def patch() -> None:
    """Mends what fails in megatron-core without TransformerEngine. Imports it. Idempotent."""
    if needed():
        from nemo_rod.megatron.plain import core  # imports megatron.core, so not earlier

        core.patch()
