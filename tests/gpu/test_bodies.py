"""The bodies of the tests for GPUs hold on a CPU as well, in small.

So the code of test_gpu.py is known to run. What only a GPU has is tested there alone: CUDA's sums,
allocator and kernels, and TransformerEngine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import WORKERS

WORKER = WORKERS / "gpu_worker.py"
TINY = {
    "size": "tiny", "vocabulary": 512, "length": 64, "blocks": 64, "dtype": "float32",
    "layers": "local", "tensor": 1, "large_vocabulary": 131_072, "large_length": 2048,
}  # fmt: skip
BODIES = (
    "losses", "again", "prefixes", "as_in_training", "leaves_no_trace", "take_all", "rod", "memory",
)  # fmt: skip
Found = dict[str, dict[str, Any]]
Torchrun = Callable[..., list[str]]


def run(
    torchrun: Torchrun, out: Path, bodies: tuple[str, ...], processes: int = 1, **changes: Any
) -> Found:
    """What each body found; `changes` replace values of `TINY`."""
    values = json.dumps({**TINY, **changes})
    out.mkdir(parents=True, exist_ok=True)
    torchrun(processes, WORKER, out, values, *bodies, timeout=280)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in bodies}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bodies")


@pytest.fixture(scope="module")
def found(torchrun: Torchrun, folder: Path) -> Found:
    return run(torchrun, folder, BODIES)


def test_losses_are_finite_and_the_same_twice(found: Found, folder: Path) -> None:
    assert found["losses"] == {"device": "cpu", "finite": True}
    kept = np.load(folder / "losses_cpu.npz")
    assert kept["losses"].shape == (32,) and len(kept["ids"]) == 8
    assert found["again"]["same"]
    assert max(found["again"]["moves"].values()) < 1e-5


def test_prefixes_are_parts_of_the_whole(found: Found) -> None:
    assert max(found["prefixes"]["moves"].values()) < 1e-5


def test_scores_are_the_losses_of_training(found: Found) -> None:
    assert found["as_in_training"]["moves"] < 1e-5


def test_scoring_leaves_no_trace(found: Found) -> None:
    assert found["leaves_no_trace"] == {"changed": [], "training": True}


@pytest.mark.parametrize("body", ["take_all", "rod"])
def test_steps_are_stock_steps(found: Found, body: str) -> None:
    assert found[body] == {"differs": [], "same losses": True, "trained": True, "steps": 3}


def test_logits_of_a_large_vocabulary_are_never_whole(found: Found) -> None:
    # a slice takes up to 512 MiB in fp32, and the loss works in place
    assert 0.4 < found["memory"]["gib"] < 0.7
    assert found["memory"]["all logits gib"] == 1.0


def test_two_processes_have_the_losses_of_one(
    torchrun: Torchrun, folder: Path, found: Found
) -> None:
    alone = np.load(folder / "losses_cpu.npz")
    expected = {name: alone[name] for name in alone}
    two = run(torchrun, folder, ("losses", "rod"), processes=2)
    assert two["losses"]["finite"] and two["rod"]["differs"] == []
    together = np.load(folder / "losses_cpu.npz")
    np.testing.assert_allclose(together["losses"], expected["losses"], rtol=0, atol=1e-5)
    assert together["ids"].tolist() == expected["ids"].tolist()


def test_a_trace_would_be_found(torchrun: Torchrun, tmp_path: Path) -> None:
    """A pass that draws random numbers, and a step on other blocks, are not called equal."""
    found = run(torchrun, tmp_path, ("leaves_no_trace", "rod"), spoil=True)
    assert found["leaves_no_trace"]["changed"] == ["random"]
    assert found["rod"]["differs"] != []
