"""Every setting of the paper, rehearsed on NeMo-RL's own workers (`make test-nemo-rl-worker`)."""

import json
import subprocess

import pytest
from command_line import OF_THE_PAPER
from nemo_rl_runs import CLI, records

pytestmark = pytest.mark.nemo_rl

# what no CPU has, and what the recipes' layouts need in twice the memory of bf16
WITHOUT_A_GPU = (
    *("model.precision=fp32", "plan.peak_tflops=80", "train.recompute=full"),
    *("train.precision_aware_optimizer=false", "train.optimizer_offload=false"),
    "++nemo_rl.policy.megatron_cfg.moe_permute_fusion=false",
    "++nemo_rl.policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",  # references
)
STEPS = 3


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", OF_THE_PAPER)
def test_a_setting_trains_on_nemo_rl(recipe, pinned, tmp_path):
    done = subprocess.run(
        [
            *(*CLI, "rehearse", f"recipe={recipe}", "launcher=nemo_rl", "arms=[no_replay,rod]"),
            *(f"run_dir={tmp_path / 'run'}", "rehearsal.processes=2", f"rehearsal.steps={STEPS}"),
            *WITHOUT_A_GPU,
        ],
        env={**pinned, "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path / "converted")},
        capture_output=True,
        text=True,
    )
    folder = tmp_path / "run_rehearsal"
    table = json.loads((folder / "table.json").read_text())
    print(table["rows"])
    assert {row["state"] for row in table["rows"]} <= {"done", "not seen"}, done.stderr[-8000:]
    assert done.returncode == 0
    for arm in ("no_replay", "rod"):
        assert len(records(folder / "arms" / arm)) == STEPS
        assert (folder / "arms" / arm / "evaluation.json").exists()
