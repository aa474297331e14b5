"""CUDA without TransformerEngine is a set-up of its own, and so is the reverse; no GPU needed."""

import os
import subprocess
import sys
import types
from functools import partial

import pytest
from tiny import ARCHITECTURE

from nemo_rod.config import Model

# importing Megatron warns of what a machine without CUDA lacks
pytestmark = pytest.mark.filterwarnings("ignore")

# a process that takes itself to have CUDA imports what it would import there, after a program that
# has imported megatron-core by itself
WITH_CUDA = """
import megatron.core
torch.cuda.is_available = lambda: True
import nemo_rod.megatron
from nemo_rod import cpu
assert plain.is_needed() and not cpu.is_needed()
assert not hasattr(torch.zeros, "__wrapped__"), "torch makers were redirected"
import megatron.core.extensions.transformer_engine as te
assert issubclass(te.TEColumnParallelLinear, torch.nn.Module)
import nemo_rod.megatron.train_job
from megatron.core.transformer.torch_norm import WrappedTorchNorm
assert hasattr(WrappedTorchNorm.__new__, "__wrapped__"), "norms were not marked"
"""
# and one that finds an engine and no GPU; both begin with the same imports, and the latter forks
PROGRAM = """
import contextlib, importlib.util, os, sys
import torch
from nemo_rod.cpu import plain
child = os.fork()
if child == 0:
    sys.path.insert(0, sys.argv[1])
    assert importlib.util.find_spec("transformer_engine") is not None
    plain.prepare()
    assert plain.is_needed() and importlib.util.find_spec("transformer_engine") is None
    with contextlib.suppress(ImportError):
        import transformer_engine
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_cuda_without_transformer_engine_and_the_reverse_are_mended(tmp_path):
    """The former imports Megatron whole; an engine without a GPU counts as missing."""
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('no CUDA driver')")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + WITH_CUDA, tmp_path],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_stubs_are_seen_only_by_the_modules_that_need_them():
    import nemo_rod.megatron.train_job  # noqa: F401

    for name in ("transformer_engine", "megatron.energon", "nvidia_resiliency_ext", "fla"):
        assert name not in sys.modules
    from megatron.core.transformer import transformer_config

    assert not getattr(transformer_config, "HAVE_TE", False)


def test_gradients_are_fused_where_the_output_layer_can(tmp_path, monkeypatch):
    """With TransformerEngine and without Apex, Bridge would end in the output layer."""
    from nemo_rod.config import Parallel
    from nemo_rod.cpu import plain
    from nemo_rod.megatron import models
    from nemo_rod.run.base_model import initialise_base

    # isort: split
    from megatron.bridge.utils import fusions

    initialise_base(ARCHITECTURE, tmp_path / "base", tokenizer="byte", seed=0)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(plain, "is_needed", lambda: False)
    monkeypatch.setattr(models, "_check_layout", lambda *_: None)
    base = str(tmp_path / "base")
    fp32 = partial(Model, precision="fp32")
    with pytest.raises(ValueError, match=r"model\.provider\.moe_new is unknown to the installed"):
        models.model_provider(base, Parallel(), fp32(provider={"moe_new": 1}), block_size=64)
    model = fp32(provider={"moe_router_fusion": True})
    _, provider = models.model_provider(base, Parallel(), model, block_size=64)
    assert provider.moe_router_fusion
    # granted by Bridge if it only checks for TransformerEngine
    names = fusions.can_enable_gradient_accumulation_fusion.__code__.co_names
    granted = "transformer_engine.pytorch" in names
    assert type(provider)().gradient_accumulation_fusion == granted
    assert not provider.gradient_accumulation_fusion
