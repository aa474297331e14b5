"""Training in less memory: recomputation changes nothing, and narrower gradients train."""

from pathlib import Path
from typing import Any

import pytest
from places import WORKERS
from test_resume import assert_same_run
from tiny import BATCH, metric, prepare_beginning, printed, write_beginning

from nemo_rod.config import Parallel
from nemo_rod.selection.curriculum.journal import read_rows

torch = pytest.importorskip("torch")
STEPS, MICRO_BATCHES = 4, BATCH // 2
# changed settings, and the precision
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "fp32"), "selective": ({"recompute": "selective"}, "fp32"),
    "full": ({"recompute": "full"}, "fp32"), "narrow": ({"grad_reduce": "bf16"}, "bf16"),
    "wide": ({}, "bf16"), "aware": ({"precision_aware_optimizer": True}, "bf16"),
    "offload": ({"precision_aware_optimizer": True, "optimizer_offload": True}, "bf16"),
}  # fmt: skip
Found = tuple[Path, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, torchrun):
    """The folder of all jobs, and the worker's line about each."""
    root = tmp_path_factory.mktemp("economies")
    prepare_beginning(root)
    files = [write(root, name) for name in JOBS]
    (output,) = torchrun(1, WORKERS / "jobs_worker.py", "--count", *files, timeout=600)
    return root, dict(zip(JOBS, printed(output), strict=True))


def write(root: Path, name: str) -> Path:
    changes, precision = JOBS[name]
    return write_beginning(
        root, name, {"steps": STEPS, "lr": 3e-3, **changes}, "no_replay",
        parallel=Parallel(distributed_optimizer="precision_aware_optimizer" in changes),
        model__precision=precision, checkpoint__every=200, validation__every=2,
        validation__blocks=4,
    )  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "again"), [("selective", "core"), ("full", "layer")])
def test_what_is_computed_again_trains_the_same_bits(name, again, trained):
    root, results = trained
    plain, calls = results["plain"]["calls"], results[name]["calls"]
    assert plain["layer training"] == plain["core training"] == STEPS * MICRO_BATCHES
    assert calls[f"{again} training"] == 2 * STEPS * MICRO_BATCHES
    # scoring computes nothing twice
    assert plain["layer scoring"] > 0
    assert calls["layer scoring"] == plain["layer scoring"]
    assert calls["core scoring"] == plain["core scoring"]
    assert_same_run(root / "plain", root / name, steps=STEPS)
    rows = read_rows(root / name / "metrics.jsonl")
    assert any(key.startswith("validation/") for row in rows for key in row)


@pytest.mark.timeout(900)
def test_gradients_are_added_up_in_the_dtype_that_is_asked_for(trained):
    root, results = trained
    assert results["plain"]["gradients"] == results["wide"]["gradients"] == "torch.float32"
    assert results["narrow"]["gradients"] == "torch.bfloat16"
    narrow, wide = (metric(root / name, "train/loss") for name in ("narrow", "wide"))
    assert narrow[0] == wide[0]  # the first loss is from before any update
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU refuses them")
def test_an_optimizer_that_is_not_there_is_refused(trained):
    _, results = trained
    assert results["aware"]["refused"] == (
        "train.precision_aware_optimizer=true needs the Adam of TransformerEngine, which is not "
        "installed: leave it out."
    )
    assert results["offload"]["refused"] == (
        "train.optimizer_offload=true moves the optimizer from a GPU to its host, and there is no "
        "GPU: leave it out."
    )
