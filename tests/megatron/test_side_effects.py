"""A RoD step trains, to the bit, as an ordinary step on the same winners; scoring leaves no trace.

The ordinary run is Megatron-Bridge's own `train_step` with nothing of ours in it, on a data
iterator over the recorded choices. Every hazard of a pass inside a training step that shows on a
CPU is switched on in one of the cases.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import WORKERS
from tiny import LAYOUTS, MOE_LAYOUTS, Setting

from nemo_rod.config import Parallel
from nemo_rod.selection import Curriculum

WORKER = WORKERS / "ordinary_worker.py"
STEPS = 5
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
ROUTERS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_input_jitter_eps": 0.05,
}
INTERLEAVED = Parallel(data=2, pipeline=2, virtual_pipeline=2, distributed_optimizer=True)
# the layout, and changed settings of the model and of the trainer
CASES: dict[str, tuple[Parallel, dict[str, Any]]] = {
    "dropout": (LAYOUTS["single"], {"model": DROPOUT}),
    "dropout_distopt": (LAYOUTS["tp2_dp2_distopt"], {"model": DROPOUT}),
    "interleaved": (INTERLEAVED, {"model": DROPOUT, "ddp": {"align_param_gather": True}}),
    "multi_token_prediction": (LAYOUTS["single"], {"model": {**DROPOUT, "mtp_num_layers": 1}}),
    # scoring skips weights that training then has to gather
    "multi_token_prediction_distopt": (
        LAYOUTS["dp2_distopt"],
        {"model": {**DROPOUT, "mtp_num_layers": 1}},
    ),
    "rerun": (
        LAYOUTS["single"],
        {"model": DROPOUT, "rerun_state_machine": {"rerun_mode": "report_determinism_stats"}},
    ),
}


def both_runs(
    setting: Setting, name: str, parallel: Parallel, changes: dict[str, Any], **options: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The final state of every rank: after RoD, and after ordinary steps on RoD's choice."""
    folders = {mode: setting.root / f"{name}_{mode}" for mode in ("rod", "ordinary")}
    for mode, folder in folders.items():
        job = setting.rod_job(folder, parallel, steps=STEPS, **options)
        (folder / "changes.json").write_text(json.dumps(changes))
        if mode == "ordinary":
            shutil.copy(folders["rod"] / "curriculum.rod", folder)
        arguments = (mode, job, folder / "changes.json", folder)
        setting.torchrun(parallel.world_size, WORKER, *arguments, timeout=300)
    return [
        (load(folders["rod"] / f"rod_{rank}.pt"), load(folders["ordinary"] / f"ordinary_{rank}.pt"))
        for rank in range(parallel.world_size)
    ]


def assert_update_is_ordinary(
    setting: Setting,
    case: str,
    parallel: Parallel,
    changes: dict[str, Any],
    *,
    rounding: float = 1e-5,
    **options: Any,
) -> None:
    """`rounding` is how far two layouts' scores of a block may differ, nats per token."""
    runs = both_runs(setting, case, parallel, changes, **options)
    path = setting.root / f"{case}_rod" / "curriculum.rod"
    first = next(iter(Curriculum.open(path, read_only=True)))
    is_replay = setting.store.is_replay(first.block_ids)
    assert is_replay.any()
    # scored without dropout: the base has not forgotten anything yet
    np.testing.assert_allclose(first.score[is_replay], 0, rtol=0, atol=rounding)
    assert_same_ends(runs)


def assert_same_ends(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for rod, ordinary in runs:
        assert len(rod["metrics"]) == STEPS
        assert rod["changed by scoring"] == []
        for key in ("metrics", "end"):
            torch.testing.assert_close(rod[key], ordinary[key], rtol=0, atol=0)


def load(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=False)


@pytest.mark.layouts
@pytest.mark.gpu  # whose random state, fused kernels and asynchronous copies a CPU does not have
@pytest.mark.parametrize("case", CASES)
def test_update_equals_an_ordinary_one(tiny, case):
    if torch.cuda.is_available() and CASES[case][0].world_size > torch.cuda.device_count():
        pytest.skip(f"needs {CASES[case][0].world_size} GPUs")
    assert_update_is_ordinary(tiny, case, *CASES[case])


@pytest.mark.layouts
def test_update_of_routers_equals_an_ordinary_one(moe):
    runs = both_runs(moe, "routers", MOE_LAYOUTS["dp2_ep2"], {"model": ROUTERS})
    assert_same_ends(runs)
    for rod, _ in runs:
        biases = [
            buffer
            for chunk in rod["end"]["buffers"]
            for name, buffer in chunk.items()
            if name.endswith("expert_bias")
        ]
        assert biases and all(bias.any() for bias in biases)  # the hazard was there


@pytest.mark.layouts
def test_interleaved_schedule_with_default_communication_is_refused(tiny):
    folder = tiny.root / "default_p2p"
    job = tiny.rod_job(folder, LAYOUTS["pp2_vpp2"], steps=STEPS)
    wrong = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    (folder / "changes.json").write_text(json.dumps({"model": wrong}))
    arguments = ("rod", job, folder / "changes.json", folder)
    outputs = tiny.torchrun(2, WORKER, *arguments, timeout=300, expect_failure=True)
    refusal = "virtual pipeline stages with these p2p settings: it trains on wrong gradients"
    assert all(refusal in output for output in outputs), outputs
    assert not (folder / "metrics.jsonl").exists()
