"""Configurations of the authors' runs as a recipe, whose arms are those of the shipped ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import composed, here

from nemo_rod.config import Config
from nemo_rod.lab.composing import composed as composed_with
from nemo_rod.run.variants import arm_settings

RECIPE = "legal_nemotron_nano_12b_v2"
DEFAULT = {
    "defaults": "/opt/nemo-rl/examples/configs/sft.yaml",
    "sft": {"max_num_steps": 5000, "val_period": 250, "seed": 42},
    "rod": {"top_k": 32, "selection_strategy": "top_k", "enable_selection": True},
    "data_mixer": {"replay_share": 1.0, "max_val_samples_per_origin": 200},
    "checkpointing": {"save_period": 5000, "keep_top_k": 1},
    "policy": {
        "model_name": "${oc.env:ROD_MODEL_DIR,/models/base}",
        "train_global_batch_size": 256, "train_micro_batch_size": 1,
        "max_total_sequence_length": 4096, "logprob_batch_size": 8, "max_grad_norm": 1.0,
        "megatron_cfg": {
            "activation_checkpointing": True,
            "tensor_model_parallel_size": "${oc.decode:${oc.env:ROD_TP,1}}",
            "optimizer": {
                "lr": 1e-5, "min_lr": 1e-5, "weight_decay": 0.1, "adam_beta1": 0.9,
                "adam_beta2": 0.95, "adam_eps": 1e-8, "use_precision_aware_optimizer": True,
                "optimizer_cpu_offload": False,
            },
            "scheduler": {"lr_decay_style": "constant", "lr_warmup_iters": 20},
            "distributed_data_parallel_config": {"grad_reduce_in_fp32": False},
        },
    },
}  # fmt: skip


def scheduled(steps: int, pool: int, warmup: int, decay: int, **more: Any) -> dict[str, Any]:
    """A run; warm-up and decay in pools, as the scheduler counts them."""
    adam = {"lr": 0.00012, "min_lr": 1.2e-05}
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine", "lr_warmup_iters": warmup}
    megatron = {"optimizer": adam, "scheduler": wsd | {"lr_wsd_decay_iters": decay}}
    policy = {"train_global_batch_size": pool, "megatron_cfg": megatron}
    return {"sft": {"max_num_steps": steps, "val_batches": 100}, "policy": policy, **more}


PLAIN, MIXED = {"enable_selection": False}, {"replay_share": 0.111}
FIXED = {"top_k": 1024, "selection_strategy": "fixed_ratio_rho", "fixed_replay_ratio": 0.072}
RUNS: dict[str, dict[str, Any]] = {
    "rod": scheduled(2958, 2048, 25, 308, rod={"top_k": 1024}),
    "specialist": scheduled(2898, 1024, 25, 580, rod=PLAIN, data_mixer={"replay_share": 0.0}),
    "fixed-replay-10": scheduled(2958, 1024, 25, 615, rod=PLAIN, data_mixer=MIXED),
    "fixed-replay-20-long": scheduled(
        3620, 1024, 25, 724, rod=PLAIN, data_mixer={"replay_share": 0.25}
    ),
    "max-replay": scheduled(5795, 1024, 25, 1159, rod=PLAIN),
    "rod-m4": scheduled(3840, 4096, 25, 154, rod={"top_k": 1024}),
    "ablation-fixed-share-rho": scheduled(3538, 4096, 25, 154, rod=FIXED),
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """JSON is YAML."""
    for name, values in {"default": DEFAULT, **RUNS}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values))
    return tmp_path


def imported(folder: Path, *names: str, keys: tuple[str, ...] = ()) -> Config:
    """The recipe that is made of the defaults and these runs."""
    files = [folder / f"{name}.yaml" for name in ("default", *names)]
    out = folder / "my" / "recipe" / "legal.yaml"
    here("import", "config", *files, out, f"recipe={RECIPE}", *keys)
    return composed_with("recipe=legal", folder=folder / "my")


def test_arms_are_those_of_the_shipped_recipe(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = imported(theirs, *RUNS)
    assert "sft.val_batches=100" in capsys.readouterr().out
    shipped = composed(f"recipe={RECIPE}")
    assert ours.model.hf == shipped.model.hf and ours.domain.sources == shipped.domain.sources
    arms = ["no_replay", "fixed_10", "fixed_20_long", "max_replay", "rod_m4", "rho_rho"]
    assert ours.arms == ["base", "rod", *arms]
    for name in ours.arms[1:]:
        one, two = arm_settings(ours, name), arm_settings(shipped, name)
        for key in ("steps", "warmup", "decay", "batch_size", "lr", "min_lr_ratio", "clip_grad"):
            assert getattr(one.train, key) == pytest.approx(getattr(two.train, key)), (name, key)
        for key in ("retention", "share", "adaptation", "replay"):
            assert getattr(one.variant, key) == getattr(two.variant, key), (name, key)
        assert one.of == two.of and (not one.scores or one.selection == two.selection)
    assert (ours.train.recompute, ours.train.grad_reduce) == ("full", "bf16")
    assert (ours.validation.every, ours.validation.blocks, ours.checkpoint.keep) == (250, 200, 1)


def test_a_transfer_trains_on_the_curriculum_that_is_named(theirs: Path) -> None:
    # their folders are known there alone
    rod = {**PLAIN, "curriculum_trace_dirs": ["${oc.env:ROD_TRACE_DIR_1}"]}
    (theirs / "transfer.yaml").write_text(json.dumps(scheduled(2862, 1024, 25, 612, rod=rod)))
    with pytest.raises(ValueError, match="give the folder of the arm"):
        imported(theirs, "transfer")
    ours = imported(theirs, "transfer", keys=("curriculum=runs/german_qwen3_5_4b",))
    arm = arm_settings(ours, "rod_transfer")
    assert (arm.variant.curriculum, arm.train.decay) == ("runs/german_qwen3_5_4b", 612)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sft": {"max_num_steps": 0}}, "trains for 0 steps: leave it out"),
        ({"rod": {"selection_strategy": "newest"}}, "selection_strategy=newest is unknown"),
        ({"policy": {"megatron_cfg": {}}}, "decays by constant and None, and here by WSD"),
        ({"sft": {"max_num_steps": 9, "val_period": -1}}, "validation.every=-1 is not valid"),
        ([1], "has no section sft or policy"),
    ],
)
def test_what_is_no_run_is_refused_and_nothing_is_written(
    theirs: Path, change: Any, sentence: str
) -> None:
    values = {**RUNS["rod"], **change} if isinstance(change, dict) else change
    (theirs / "rod.yaml").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=sentence):
        imported(theirs, "rod")
    assert not [*(theirs / "my").glob("recipe/*")]
