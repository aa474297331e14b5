"""The digest in the header of a run on NeMo-RL: an interrupted run resumes with the same one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_rod.hosts.nemo_rl.inputs import config_digest
from nemo_rod.selection.arms import make_arm

OPTIMIZER = "policy.megatron_cfg.optimizer"
GOOD: dict[str, Any] = {
    "rod.config_digest": None, "rod.steps": 3, "rod.selection.on_nonfinite": "refuse",
    "policy.model_name": "team/model", "policy.precision": "bfloat16",
    "policy.train_global_batch_size": 16, "policy.megatron_cfg.enabled": True,
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 1,
    f"{OPTIMIZER}.lr": 1e-3, f"{OPTIMIZER}.use_distributed_optimizer": True,
    f"{OPTIMIZER}.use_precision_aware_optimizer": False,
    f"{OPTIMIZER}.optimizer_cpu_offload": False, f"{OPTIMIZER}.optimizer_offload_fraction": 0.0,
    f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d": False,
}  # fmt: skip


def digest(changes: dict[str, Any] | None = None, **arm: Any) -> str:
    """The digest after changes of keys in `GOOD`, and of an arm with others."""
    assert {*(changes or {})} <= {*GOOD}
    config = OmegaConf.create()
    for key, value in {**GOOD, **(changes or {})}.items():
        OmegaConf.update(config, key, value)
    known: dict[str, Any] = {"multiplier": 2.0, "balance": "expected", "kappa": 1.0, "seed": 5}
    made = make_arm("rod", num_adaptation=9, num_replay=9, batch_size=16, **{**known, **arm})
    values: Any = OmegaConf.to_container(config)
    return config_digest(values, made)


@pytest.mark.parametrize(
    ("changes", "resumes"),
    [
        ({f"{OPTIMIZER}.use_distributed_optimizer": False}, True),
        ({f"{OPTIMIZER}.use_precision_aware_optimizer": True}, True),
        ({f"{OPTIMIZER}.optimizer_cpu_offload": True}, True),
        ({f"{OPTIMIZER}.optimizer_offload_fraction": 1.0}, True),
        ({f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d": True}, True),
        ({"policy.megatron_cfg.tensor_model_parallel_size": 4}, True),
        ({f"{OPTIMIZER}.lr": 2e-3}, False),
        ({"policy.megatron_cfg.scheduler.lr_warmup_iters": 2}, False),
        ({"policy.model_name": "team/other"}, False),
        ({"policy.precision": "float32"}, False),
        ({"policy.train_global_batch_size": 32}, False),
        ({"rod.selection.on_nonfinite": "exclude"}, True),  # the cure of a run that was refused
        ({"rod.steps": 4}, False),
        # and of the arm, which a hand-written configuration describes itself
        ({"kappa": 2.0}, False),
        ({"multiplier": 4.0}, False),
        ({"prefix": "1/2"}, False),
    ],
)
def test_only_layout_and_memory_may_change(changes: dict[str, Any], resumes: bool) -> None:
    (key,) = changes
    changed = digest(changes) if key in GOOD else digest(**changes)
    assert (changed == digest()) is resumes


def test_a_recipes_job_has_its_own_digest() -> None:
    elsewhere = {"policy.model_name": "run/base/hf", f"{OPTIMIZER}.optimizer_cpu_offload": True}
    assert digest({**elsewhere, "rod.config_digest": "abc"}, recorded="no/such/file") == "abc"


def test_a_recorded_curriculum_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "curriculum.rod"
    file.write_bytes(b"steps")
    before = digest(recorded="curriculum.rod")
    assert before == digest(recorded=str(file)) != digest()
    file.write_bytes(b"other steps")
    assert before != digest(recorded=str(file))


def test_a_model_is_known_under_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")

    def with_model(model: Path | str) -> str:
        return digest({"policy.model_name": str(model)})

    before = with_model("base")
    assert with_model(base) == with_model("./base") == before
    assert with_model(shutil.copytree(base, tmp_path / "copied")) == before
    (base / "model.safetensors").write_bytes(b"those of a larger one")
    assert with_model("base") != before
