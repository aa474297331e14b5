"""What must hold on NVIDIA GPUs (make test-gpu); test_bodies.py runs the same bodies on a CPU.

All bodies of one kind of model run in one process, since starting CUDA takes seconds. Tests of
TransformerEngine's layers, of FP8 and of two GPUs are skipped where these are not there.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import WORKERS

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
WORKER = WORKERS / "gpu_worker.py"
SMALL = {
    "size": "tiny", "vocabulary": 512, "length": 256, "blocks": 64, "dtype": "float32",
    "layers": "local", "tensor": 1, "large_vocabulary": 248_320, "large_length": 4096,
}  # fmt: skip
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
STOCK = {"differs": [], "same losses": True, "trained": True, "steps": 3}
MODELS = {
    "fp32": SMALL,
    "bf16": {**SMALL, "dtype": "bfloat16"},
    "te": {**SMALL, "dtype": "bfloat16", "layers": "te"},
    # per-tensor current scaling, in training and in scoring alike
    "te_fp8": {
        **SMALL, "dtype": "bfloat16", "layers": "te",
        "options": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    },
}  # fmt: skip
BODIES = ("losses", "again", "prefixes", "as_in_training", "leaves_no_trace", "take_all", "rod")
Run = Callable[..., dict[str, Any]]

if GPUS == 0:
    pytestmark = [pytest.mark.gpu, pytest.mark.skip(reason="torch sees no GPU")]


def needs_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine is not installed")


def needs_fp8() -> None:
    needs_engine()
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def found(torchrun: Callable[..., list[str]], folder: Path) -> Run:
    """Runs bodies of a model, each once, and returns what they found."""
    kept: dict[tuple, dict[str, Any]] = {}

    def run(model: str, bodies: tuple[str, ...], processes: int = 1, **changes: Any) -> Any:
        key = (model, bodies, processes, str(changes))
        out = folder / "_".join(map(str, (model, processes, *changes.values())))
        if key not in kept:
            out.mkdir(exist_ok=True)
            values = json.dumps({**MODELS[model], **changes})
            # a new interpreter, as what was set before CUDA starts holds from its start on
            torchrun(processes, WORKER, out, values, *bodies, timeout=400, env=EXACT, fresh=True)
            read = {name: json.loads((out / f"{name}.json").read_text()) for name in bodies}
            kept[key] = {**read, "out": out}
        return kept[key]

    return run


def test_losses_and_choices_are_those_of_a_cpu(
    found: Run, torchrun: Callable[..., list[str]], folder: Path
) -> None:
    """In fp32 without TF32; nats per token."""
    gpu = found("fp32", BODIES)
    assert gpu["losses"] == {"device": "cuda", "finite": True}
    hidden = {**EXACT, "CUDA_VISIBLE_DEVICES": ""}
    values = json.dumps(MODELS["fp32"])
    torchrun(1, WORKER, gpu["out"], values, "losses", timeout=400, env=hidden, fresh=True)
    on_gpu, on_cpu = (np.load(gpu["out"] / f"losses_{kind}.npz") for kind in ("cuda", "cpu"))
    np.testing.assert_allclose(on_gpu["losses"], on_cpu["losses"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(on_gpu["scores"], on_cpu["scores"], rtol=0, atol=1e-4)
    assert on_gpu["ids"].tolist() == on_cpu["ids"].tolist()


# by how much a score may depend on the shape of the pass, nats per token: rounding
MOVES = {"fp32": 1e-4, "bf16": 3e-2, "te": 3e-2, "te_fp8": 1e-1}


@pytest.mark.parametrize("model", MODELS)
class TestModel:
    """What holds of a model in each arithmetic that it may have."""

    @pytest.fixture(autouse=True)
    def engine(self, model: str) -> None:
        if model == "te_fp8":
            needs_fp8()
        elif model == "te":
            needs_engine()

    def test_same_call_gives_the_same_bits(self, found: Run, model: str) -> None:
        again = found(model, BODIES)["again"]
        assert again["same"]
        assert max(again["moves"].values()) < MOVES[model]

    def test_prefixes_are_parts_of_the_whole(self, found: Run, model: str) -> None:
        assert max(found(model, BODIES)["prefixes"]["moves"].values()) < MOVES[model]

    def test_scores_are_the_losses_of_training(self, found: Run, model: str) -> None:
        """Of the same micro-batches; scoring may use another cross entropy than training."""
        limit = MOVES[model] if model == "te_fp8" else 1e-5
        assert found(model, BODIES)["as_in_training"]["moves"] < limit

    def test_scoring_leaves_no_trace(self, found: Run, model: str) -> None:
        """Weights, optimizer and random states are as they were, to the bit."""
        expected = {"changed": [], "training": True}
        assert found(model, BODIES)["leaves_no_trace"] == expected

    @pytest.mark.parametrize("body", ["take_all", "rod"])
    def test_steps_are_stock_steps(self, found: Run, model: str, body: str) -> None:
        assert found(model, BODIES)[body] == STOCK


def test_scoring_needs_less_than_a_gib_beside_the_weights(found: Run) -> None:
    """With a vocabulary of 248k, in blocks of 4096 tokens, whose logits would take 3.8 GiB."""
    memory = found("bf16", ("memory",), size="05b")["memory"]
    assert memory["all logits gib"] > 3.7
    assert memory["gib"] < 1


def test_scoring_in_fp8_leaves_training_alone(found: Run) -> None:
    needs_fp8()
    fp8 = found("te", ("fp8_scoring",))["fp8_scoring"]
    assert {name: fp8[name] for name in STOCK} == STOCK
    assert fp8["differs"] == [] and fp8["other scores"] and fp8["own again"]
    assert fp8["moves"] < MOVES["te_fp8"]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}], ids=["data", "tensor"])
def test_two_gpus_have_the_losses_of_one(found: Run, layout: dict[str, int]) -> None:
    alone = found("fp32", BODIES)["out"]
    two = found("fp32", ("losses", "again", "rod"), processes=2, **layout)
    assert two["again"]["same"] and two["rod"] == STOCK
    if not layout:  # the same weights; two tensor-parallel ranks draw their own
        one, other = (np.load(out / "losses_cuda.npz") for out in (alone, two["out"]))
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=0, atol=1e-4)
        assert one["ids"].tolist() == other["ids"].tolist()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_tensor_parallel_overlap_scores_the_same(found: Run) -> None:
    """With TransformerEngine's user buffers, which are of the size of a training micro-batch."""
    needs_engine()
    plain = found("te", ("overlap",), processes=2, tensor=2)["overlap"]
    assert plain["moves"] < MOVES["te"]
