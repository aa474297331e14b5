"""What must hold of scoring and of a step on NVIDIA GPUs (make test-gpu), and in small on a CPU.

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

GPUS = torch.cuda.device_count()
WORKER = WORKERS / "gpu_worker.py"
SMALL = {
    "size": "tiny", "vocabulary": 512, "length": 256, "blocks": 64, "dtype": "float32",
    "layers": "local", "tensor": 1, "large_vocabulary": 248_320, "large_length": 4096,
}  # fmt: skip
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
STOCK = {"differs": [], "same losses": True, "trained": True, "steps": 3}
MODELS = {
    "cpu": {**SMALL, "length": 64, "large_vocabulary": 131_072, "large_length": 2048},
    "fp32": SMALL,
    "bf16": {**SMALL, "dtype": "bfloat16"},
    "te": {**SMALL, "dtype": "bfloat16", "layers": "te"},
    # per-tensor current scaling, in training and in scoring alike
    "te_fp8": {
        **SMALL, "dtype": "bfloat16", "layers": "te",
        "options": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    },
}  # fmt: skip
# by how much a score may depend on the shape of the pass, nats per token: rounding
MOVES = {"cpu": 1e-5, "fp32": 1e-4, "bf16": 3e-2, "te": 3e-2, "te_fp8": 1e-1}
BODIES = ("losses", "again", "prefixes", "as_in_training", "leaves_no_trace", "take_all", "rod")
Run = Callable[..., dict[str, Any]]


needs_one = pytest.mark.skipif(GPUS < 1, reason="torch sees no GPU")
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def device(model: str) -> str:
    return "cpu" if model == "cpu" else "cuda"


def needs_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine is not installed")


def needs_fp8() -> None:
    needs_engine()
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")


@pytest.fixture(scope="module")
def measured(torchrun, tmp_path_factory):
    """Runs bodies of a model, each once, and returns what they measured."""
    kept: dict[tuple, dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("gpu")

    def run(model: str, *bodies: str, processes: int = 1, **changes: Any) -> Any:
        bodies = bodies or (*BODIES, *(["memory"] if model == "cpu" else []))
        key = (model, bodies, processes, str(changes))
        out = folder / "_".join(map(str, (model, processes, *changes.values())))
        if key not in kept:
            out.mkdir(exist_ok=True)
            values = json.dumps({**MODELS[model], **changes})
            # a new interpreter, as what was set before CUDA starts holds from its start on
            how = {"env": ON_CPU} if model == "cpu" else {"env": EXACT, "fresh": True}
            torchrun(processes, WORKER, out, values, *bodies, timeout=400, **how)
            read = {name: json.loads((out / f"{name}.json").read_text()) for name in bodies}
            kept[key] = {**read, "out": out}
        return kept[key]

    return run


def assert_same_losses(one: Path, other: Path, *names: str, atol: float = 1e-4) -> None:
    """Two files of the body `losses` have the same choice, and close arrays; nats per token."""
    kept, again = np.load(one), np.load(other)
    assert kept["losses"].shape == (32,) and len(kept["ids"]) == 8
    for name in names:
        np.testing.assert_allclose(kept[name], again[name], rtol=0, atol=atol)
    assert kept["ids"].tolist() == again["ids"].tolist()


@pytest.mark.gpu
@needs_one
def test_losses_and_choices_are_those_of_a_cpu(measured, torchrun):
    """In fp32 without TF32."""
    out, values = measured("fp32")["out"], json.dumps(MODELS["fp32"])
    hidden = {**EXACT, **ON_CPU}
    torchrun(1, WORKER, out, values, "losses", timeout=400, env=hidden, fresh=True)
    assert_same_losses(out / "losses_cuda.npz", out / "losses_cpu.npz", "losses", "scores")


@pytest.mark.parametrize(
    "model", ["cpu", *(pytest.param(m, marks=[pytest.mark.gpu, needs_one]) for m in [*MODELS][1:])]
)
class TestModel:
    """What holds of a model in each arithmetic that it may have."""

    @pytest.fixture(autouse=True)
    def engine(self, model):
        if model == "te_fp8":
            needs_fp8()
        elif model == "te":
            needs_engine()

    def test_same_call_gives_the_same_bits(self, measured, model):
        assert measured(model)["losses"] == {"device": device(model), "finite": True}
        again = measured(model)["again"]
        assert again["same"]
        assert max(again["moves"].values()) < MOVES[model]

    def test_prefixes_are_parts_of_the_whole(self, measured, model):
        assert max(measured(model)["prefixes"]["moves"].values()) < MOVES[model]

    def test_scores_are_the_losses_of_training(self, measured, model):
        """Of the same micro-batches; scoring may use another cross entropy than training."""
        limit = MOVES[model] if model == "te_fp8" else 1e-5
        assert measured(model)["as_in_training"]["moves"] < limit

    def test_scoring_leaves_no_trace(self, measured, model):
        """Weights, optimizer and random states are as they were, to the bit."""
        assert measured(model)["leaves_no_trace"] == {"changed": [], "training": True}

    @pytest.mark.parametrize("body", ["take_all", "rod"])
    def test_steps_are_stock_steps(self, measured, model, body):
        assert measured(model)[body] == STOCK


@pytest.mark.slow
def test_a_trace_would_be_found(measured):
    """A pass that draws random numbers, and a step on other blocks, are not called equal."""
    spoiled = measured("cpu", "leaves_no_trace", "rod", spoil=True)
    assert spoiled["leaves_no_trace"]["changed"] == ["random"]
    assert spoiled["rod"]["differs"] != []


def test_logits_of_a_large_vocabulary_are_never_whole(measured):
    memory = measured("cpu")["memory"]
    # a slice takes up to 512 MiB in fp32, and the loss works in place
    assert 0.4 < memory["gib"] < 0.7
    assert memory["all logits gib"] == 1.0


@pytest.mark.gpu
@needs_one
def test_scoring_needs_less_than_a_gib_beside_the_weights(measured):
    """With a vocabulary of 248k, in blocks of 4096 tokens, whose logits would take 3.8 GiB."""
    memory = measured("bf16", "memory", size="05b")["memory"]
    assert memory["all logits gib"] > 3.7
    assert memory["gib"] < 1


@pytest.mark.gpu
@needs_one
def test_scoring_in_fp8_leaves_training_alone(measured):
    needs_fp8()
    fp8 = measured("te", "fp8_scoring")["fp8_scoring"]
    assert {name: fp8[name] for name in STOCK} == STOCK
    assert fp8["differs"] == [] and fp8["other scores"] and fp8["own again"]
    assert fp8["moves"] < MOVES["te_fp8"]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("cpu", {}, marks=pytest.mark.slow),
        pytest.param("fp32", {}, marks=[pytest.mark.gpu, needs_two]),
        pytest.param("fp32", {"tensor": 2}, marks=[pytest.mark.gpu, needs_two]),
    ],
)
def test_two_processes_have_the_losses_of_one(measured, model, layout):
    alone = measured(model)["out"]
    two = measured(model, "losses", "again", "rod", processes=2, **layout)
    assert two["losses"]["finite"] and two["again"]["same"] and two["rod"] == STOCK
    if not layout:  # the same weights; two tensor-parallel ranks draw their own
        name = f"losses_{device(model)}.npz"
        assert_same_losses(alone / name, two["out"] / name, "losses", atol=MOVES[model])


@pytest.mark.gpu
@needs_two
def test_tensor_parallel_overlap_scores_the_same(measured):
    """With TransformerEngine's user buffers, which are of the size of a training micro-batch."""
    needs_engine()
    plain = measured("te", "overlap", processes=2, tensor=2)["overlap"]
    assert plain["moves"] < MOVES["te"]
