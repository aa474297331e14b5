"""Merges of what Megatron-Bridge saved, which it loads again under other layouts, and exports.

The oracle is the merge of the Hugging Face checkpoints that the models came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from places import WORKERS
from safetensors.torch import load_file
from tiny import ARCHITECTURE, MOE_ARCHITECTURE

from nemo_rod.lab.tasks import merge_checkpoints
from nemo_rod.run.base_model import initialise_base

WORKER = WORKERS / "merging_worker.py"


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("architecture", "precision", "base", "adapted", "layout"),
    [
        ({}, "fp32", {"tensor": 2}, {"data": 2}, {"pipeline": 2}),
        ({"tie_word_embeddings": True}, "bf16", {"pipeline": 2}, {"tensor": 2}, {"data": 2}),
        (
            MOE_ARCHITECTURE,
            "fp32",
            {"data": 2},
            {"data": 2, "expert": 2},
            {"tensor": 2, "expert": 2, "sequence": True},
        ),
    ],
    ids=["dense", "tied", "experts"],
)
def test_bridge_trains_on_from_a_merge_and_exports_it(
    tmp_path: Path,
    torchrun: Callable[..., list[str]],
    architecture: dict[str, Any],
    precision: str,
    base: dict[str, int],
    adapted: dict[str, int],
    layout: dict[str, int],
) -> None:
    for seed, side in enumerate(("base", "adapted")):
        options = {**ARCHITECTURE, **architecture}
        initialise_base(options, tmp_path / side, tokenizer="byte", seed=seed)
        if precision == "bf16":
            to_bf16(tmp_path / side)
    plan = {
        "precision": precision,
        "lambda": 0.3,
        "base": base,
        "adapted": adapted,
        "layout": layout,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    torchrun(2, WORKER, tmp_path / "plan.json")
    merge_checkpoints(tmp_path / "base", tmp_path / "adapted", tmp_path / "merged_hf", 0.3)
    expected = tensors_of(tmp_path / "merged_hf")
    for export in ("finetuned_hf", "exported_hf"):
        found = tensors_of(tmp_path / export)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            assert torch.equal(found[name], expected[name]), (export, name)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def to_bf16(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16)
    model.save_pretrained(folder)
