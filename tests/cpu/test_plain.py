"""CUDA without TransformerEngine is a set-up of its own; nothing here needs a GPU.

A process that takes itself to have CUDA imports what it would import there. The redirection of
devices must stay away, and the stand-ins for TransformerEngine must come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tiny import Setting

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


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_fused_where_the_output_layer_can(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TransformerEngine and without Apex, Bridge would end in the output layer."""
    from megatron.bridge.utils import fusions

    from nemo_rod.config import Parallel
    from nemo_rod.megatron import models

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(models.plain, "needed", lambda: False)
    monkeypatch.setattr(models, "_check_layout", lambda *_: None)
    base = str(tiny.root / "base" / "hf")
    _, provider = models.model_provider(base, Parallel(), precision="fp32", block_size=64)
    # what Bridge takes for granted, since it has asked for TransformerEngine
    asked = fusions.can_enable_gradient_accumulation_fusion.__code__.co_names
    granted = "transformer_engine.pytorch" in asked
    assert type(provider)().gradient_accumulation_fusion == granted
    assert not provider.gradient_accumulation_fusion


WITHOUT_GPU = """
import importlib.util, sys
import torch
assert importlib.util.find_spec("transformer_engine") is not None
import nemo_rod.megatron
from nemo_rod.megatron import plain
assert plain.needed()
assert importlib.util.find_spec("transformer_engine") is None
import megatron.core.extensions.transformer_engine as te
assert issubclass(te.TEColumnParallelLinear, torch.nn.Module)
"""


def test_transformer_engine_without_a_gpu_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('no CUDA driver')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = subprocess.run([sys.executable, "-c", WITHOUT_GPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
