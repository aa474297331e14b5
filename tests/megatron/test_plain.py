"""CUDA without TransformerEngine is a set-up of its own; nothing here needs a GPU.

A process that takes itself to have CUDA imports what it would import there. The redirection of
devices must stay away, and the stand-ins for TransformerEngine must come.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
torch.cuda.is_available = lambda: True
import nemo_rod.megatron
from nemo_rod.megatron import cpu, plain
assert plain.needed() and not cpu.needed()
assert not hasattr(torch.zeros, "__wrapped__"), "torch makers were redirected"
import megatron.core.extensions.transformer_engine as te
assert issubclass(te.TEColumnParallelLinear, torch.nn.Module)
import nemo_rod.megatron.train_job
from megatron.core.transformer.torch_norm import WrappedTorchNorm
assert hasattr(WrappedTorchNorm.__new__, "__wrapped__"), "norms were not marked"
"""


@pytest.mark.filterwarnings("ignore")
def test_cuda_without_transformer_engine_imports_and_is_mended() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore")
def test_stubs_are_seen_by_those_who_need_them_alone() -> None:
    import nemo_rod.megatron.train_job  # noqa: F401

    for name in ("transformer_engine", "megatron.energon", "nvidia_resiliency_ext", "fla"):
        assert name not in sys.modules
    from megatron.core.transformer import transformer_config

    assert not getattr(transformer_config, "HAVE_TE", False)
