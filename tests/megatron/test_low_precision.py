"""A scoring pass in FP8: where it is refused, and that it is in effect in the pass alone.

TransformerEngine does not run on a CPU: a stand-in of its names takes its place where the wiring is
tested. What its FP8 gives is for a GPU to tell (tests/gpu), and benchmarks/fp8_fidelity.py rounds.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import configured

from nemo_rod.jobs import ExportJob, ReferenceJob, TrainJob
from nemo_rod.selection import References, ReferenceWriter
from nemo_rod.selection.references.folder import role_manifest

# which looks for TransformerEngine before its stand-in is there
pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def engine(monkeypatch):
    """The names of TransformerEngine that are used, and nothing behind them.

    Returns the recipes that they received, whether a context is in effect, and what is available.
    """
    recorded = SimpleNamespace(recipes=[], active=False, available=(True, ""))

    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
        assert enabled and not recorded.active
        recorded.recipes.append(recipe)
        recorded.active = True
        try:
            yield
        finally:
            recorded.active = False

    pytorch: Any = ModuleType("transformer_engine.pytorch")
    pytorch.autocast, pytorch.is_fp8_available = autocast, lambda **_: recorded.available
    pytorch.is_mxfp8_available = lambda **_: (False, "Blackwell or newer required.")
    recipe: Any = ModuleType("transformer_engine.common.recipe")
    recipe.Float8CurrentScaling = lambda fp8_format: ("current", fp8_format)
    recipe.MXFP8BlockScaling = lambda fp8_format: ("blocks of 32", fp8_format)
    recipe.Format = SimpleNamespace(E4M3="e4m3")
    package: Any = ModuleType("transformer_engine")
    package.pytorch, package.__spec__ = pytorch, SimpleNamespace()
    for module in (package, pytorch, ModuleType("transformer_engine.common"), recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return recorded


class Linear(torch.nn.Module):
    """A layer as TransformerEngine's: with FP8's state, and weights kept in FP8."""

    def __init__(self, rows: int = 32, columns: int = 32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns))
        self.fp8_meta: dict[str, Any] = {}
        self._fp8_workspaces = {"weight": torch.zeros(1)}


def model(*layers: torch.nn.Module, **config: Any) -> list:
    chunk = torch.nn.Sequential(*layers)
    chunk.config = SimpleNamespace(**{"fp8": None, "fp4": None, "num_moe_experts": None, **config})
    return [chunk]


def test_pass_alone_is_in_fp8_and_leaves_no_weights_behind(engine):
    from nemo_rod.megatron.scoring.low_precision import low_precision

    chunks = model(Linear(), torch.nn.ReLU())
    with low_precision(chunks, None):
        assert not engine.active
    with low_precision(chunks, "fp8"):
        assert engine.active
    assert not engine.active and engine.recipes == [("current", "e4m3")]
    with low_precision(chunks, "mxfp8"):
        assert engine.active
    assert not engine.active and engine.recipes[1:] == [("blocks of 32", "e4m3")]
    assert not chunks[0][0]._fp8_workspaces
    with pytest.raises(RuntimeError, match="out of memory"), low_precision(chunks, "fp8"):
        chunks[0][0]._fp8_workspaces["weight"] = torch.zeros(1)
        raise RuntimeError("out of memory")
    assert not engine.active and not chunks[0][0]._fp8_workspaces


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        (model(Linear(), fp8="hybrid"), "the model itself is in FP8 or FP4"),
        (model(Linear(), fp4="nvfp4"), "the model itself is in FP8 or FP4"),
        (model(Linear(), num_moe_experts=4), "experts get numbers of tokens"),
        (model(torch.nn.Linear(32, 32)), "none of the model's layers is one of TransformerEngine"),
        (model(Linear(), Linear(36, 32)), r"0\.1\.weight is 36x32, and FP8 products"),
        (model(Linear(32, 24)), r"0\.0\.weight is 32x24"),
    ],
)  # fmt: skip
def test_models_that_do_not_fit_are_refused(chunks, sentence):
    from nemo_rod.megatron.scoring.low_precision import refuse_unfit

    refuse_unfit(chunks, None)
    refuse_unfit(model(Linear()), "fp8")
    named = [torch.nn.ModuleDict({"0": chunks[0]})]
    with pytest.raises(ValueError, match=rf"^scoring\.precision=fp8 does not work .*{sentence}"):
        refuse_unfit(named, "fp8")
    with pytest.raises(ValueError, match=r"0\.0\.weight is 16x32, .* multiples of 32 and 32"):
        refuse_unfit([torch.nn.ModuleDict({"0": model(Linear(16, 32))[0]})], "mxfp8")


def test_machines_without_it_are_refused(engine, monkeypatch):
    from nemo_rod.megatron.scoring.low_precision import refuse_unavailable

    refuse_unavailable(None)
    with pytest.raises(ValueError, match=r"^scoring\.precision=fp8 needs a GPU, and torch sees no"):
        refuse_unavailable("fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_unavailable("fp8")
    with pytest.raises(ValueError, match=r"mxfp8 needs MXFP8, which .* \(Blackwell or newer"):
        refuse_unavailable("mxfp8")
    engine.available = (False, "Device compute capability 8.9 or higher required.")
    with pytest.raises(ValueError, match=r"\(Device compute capability 8\.9 or higher required\):"):
        refuse_unavailable("fp8")
    monkeypatch.delitem(sys.modules, "transformer_engine")
    with pytest.raises(ValueError, match="needs TransformerEngine, which is not installed"):
        refuse_unavailable("fp8")


def test_jobs_are_refused_before_they_read_anything(tmp_path):
    from nemo_rod.megatron.forward_jobs import reference
    from nemo_rod.megatron.train_job import train

    common: dict[str, Any] = {
        "name": "job", "blocks": "/nowhere", "out": str(tmp_path / "out"), "start": "/nowhere",
        "config": configured(model__precision="bf16", scoring__precision="fp8"),
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^scoring\.precision=fp8 needs a GPU"):
        train(TrainJob(**common, arm=SimpleNamespace()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scoring\.precision=fp8 needs a GPU"):
        reference(ReferenceJob(**common, role="replay", model_digest="m", lengths=[1]))
    assert not any(tmp_path.iterdir())


def test_references_of_another_precision_are_refused_by_name(tmp_path):
    class Blocks:
        digest, tokenizer_fingerprint, block_size = "d", "t", 8
        num_adaptation, num_replay = 2, 2

        def __len__(self) -> int:
            return 4

        def hashes(self, ids: np.ndarray) -> np.ndarray:
            return np.zeros((len(ids), 16), dtype=np.uint8)

    def arithmetic(precision: str, scoring: str | None) -> str:
        config = configured(model__precision=precision, scoring__precision=scoring)
        job = ExportJob(name="", config=config, blocks="", out="", start="", saved="")
        return job.arithmetic

    blocks: Any = Blocks()
    assert arithmetic("bf16", None) == "bf16"
    made = {"adaptation": arithmetic("bf16", "fp8"), "replay": "bf16"}
    for role, precision in made.items():
        manifest = role_manifest(
            blocks, role, model="m", lengths=[blocks.block_size], precision=precision
        )
        writer = ReferenceWriter(tmp_path / role, manifest, blocks.hashes)
        writer.append(writer.missing, np.ones((len(writer.missing), 1), dtype=np.float32))
        writer.close()
    folders = [tmp_path / role for role in made]
    for precision, role, actual in (
        ("bf16", "adaptation", "fp8 over bf16"), ("fp8 over bf16", "replay", "bf16"),
    ):  # fmt: skip
        sentence = (
            rf"{role}/manifest\.json is of precision '{actual}', but candidates are scored in "
            rf"'{precision}'"
        )
        with pytest.raises(ValueError, match=sentence):
            References.open(folders, blocks, precision=precision)
    assert References.open(folders, blocks) is not None
