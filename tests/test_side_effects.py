"""A RoD step trains, to the bit, as an ordinary step on the same winners; scoring leaves no trace.

The ordinary run is Megatron-Bridge's own `train_step` with nothing of ours in it, on a data
iterator over the recorded choices. Every hazard of a pass inside a training step that shows on a
CPU is switched on in one of the cases.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LAYOUTS, MOE_LAYOUTS, Setting

from nemo_rod.config import Parallel

WORKER = Path(__file__).parent / "ordinary_worker.py"
STEPS = 5
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
ROUTERS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_input_jitter_eps": 0.05,
}
# what is switched on in the model, and whether the trainer runs every step twice
DENSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "dropout": ("single", DROPOUT, "disabled"),
    "dropout_pp2": ("pp2", DROPOUT, "disabled"),
    "dropout_distopt": ("tp2_dp2_distopt", DROPOUT, "disabled"),
    "multi_token_prediction": ("single", {**DROPOUT, "mtp_num_layers": 1}, "disabled"),
    "rerun": ("single", DROPOUT, "report_determinism_stats"),
}


def both_runs(
    setting: Setting, name: str, parallel: Parallel, model: dict[str, Any], rerun_mode: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What every rank ends with: after RoD, and after ordinary steps on what RoD chose."""
    changes = {"model": model, "rerun_mode": rerun_mode, "micro_batch_size": 2}
    folders = {mode: setting.root / f"{name}_{mode}" for mode in ("rod", "ordinary")}
    for mode, folder in folders.items():
        job = setting.rod_job(folder, parallel, steps=STEPS)
        (folder / "changes.json").write_text(json.dumps(changes))
        if mode == "ordinary":
            shutil.copy(folders["rod"] / "curriculum.rod", folder)
        arguments = (mode, job, folder / "changes.json", folder)
        setting.torchrun(parallel.world_size, WORKER, *arguments, timeout=300)
    return [
        (load(folders["rod"] / f"rod_{rank}.pt"), load(folders["ordinary"] / f"ordinary_{rank}.pt"))
        for rank in range(parallel.world_size)
    ]


def load(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=False)


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    if torch.is_tensor(one):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}/{index}")
    else:
        assert one == other, where


@pytest.mark.layouts
@pytest.mark.parametrize("case", DENSE)
def test_update_equals_an_ordinary_one(tiny: Setting, case: str) -> None:
    layout, model, rerun_mode = DENSE[case]
    for rod, ordinary in both_runs(tiny, case, LAYOUTS[layout], model, rerun_mode):
        assert len(rod["metrics"]) == STEPS
        assert rod["changed by scoring"] == []
        assert_equal(rod["metrics"], ordinary["metrics"])
        assert_equal(rod["end"], ordinary["end"])


@pytest.mark.layouts
def test_update_of_routers_equals_an_ordinary_one(moe: Setting) -> None:
    for rod, ordinary in both_runs(moe, "routers", MOE_LAYOUTS["dp2_ep2"], ROUTERS, "disabled"):
        assert rod["changed by scoring"] == []
        assert_equal(rod["metrics"], ordinary["metrics"])
        assert_equal(rod["end"], ordinary["end"])
        biases = [
            buffer
            for chunk in rod["end"]["buffers"]
            for name, buffer in chunk.items()
            if name.endswith("expert_bias")
        ]
        assert biases and all(bias.any() for bias in biases)  # the hazard was there
