"""NeMo-RL's own Megatron worker, with RoD inside, as users get it: `nemo_rl.worker` is left alone.

Its setup, `train`, and saving and loading of checkpoints run unchanged on the
Megatron-Bridge and Megatron-LM that the checkout pins, under real Ray. Only CUDA, NCCL and
TransformerEngine have stand-ins (`tests/workers/nemo_rl_cpu/without_cuda.py`). Needs a checkout
with its submodules and Python 3.12: `make test-nemo-rl-worker`. Every setting of the paper is
rehearsed on it.
"""

import json
import re
import shutil
import subprocess

import architectures
import nemo_rl_runs as rl
import pytest
from command_line import OF_THE_PAPER
from safetensors.torch import load_file, save_file
from tiny import MOE_ARCHITECTURE, STEPS, Setting

from nemo_rod.config import Parallel

pytestmark = pytest.mark.nemo_rl

OWN = {
    "policy": {
        "logprob_batch_size": 4,
        "megatron_cfg": {"moe_permute_fusion": False},  # a kernel that no CPU has
    }
}
ALONE = Parallel(distributed_optimizer=True)  # as NeMo-RL has it
# not nemotron_h: transformers 5.3, which v0.6.0 pins, has no dense layers in its own Nemotron-H
MODELS = ("qwen3", "qwen3_5", "nemotron_3_nano", "qwen3_moe")


@pytest.fixture(scope="module", params=MODELS)
def runs(request, pinned, tmp_path_factory, torchrun):
    """A setting per model, made on our own road, and runs of it on NeMo-RL's."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        setting = Setting(root, torchrun)
    elif request.param == "qwen3_moe":
        setting = Setting(root, torchrun, MOE_ARCHITECTURE)
    else:
        setting = Setting(root, torchrun, architectures.write(request.param, root / "model"))
    converted = {"NRL_MEGATRON_CHECKPOINT_DIR": str(root / "converted")}
    runs = rl.Runs(setting, {**pinned, **converted})
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def trained(runs):
    return runs.train("own", OWN, parallel=ALONE)


def test_own_worker_chooses_as_megatron_bridge_does(runs, trained):
    rl.assert_same_choices_as_bridge(runs.tiny, trained)


def test_own_worker_resumes_from_its_own_checkpoint(runs, trained):
    out = runs.tiny.root / "own_killed"
    job = runs.job(out, OWN, ALONE)
    rl.kill_after(runs.start(*job), out, 11)
    assert (out / "checkpoints" / "step_8").is_dir()
    runs.run(*job)
    assert [row["step"] for row in rl.rows(out)] == list(range(STEPS))
    assert rl.chosen_ids(out) == rl.chosen_ids(trained)
    assert rl.rows(out) == rl.rows(trained)


def test_own_worker_refuses_a_checkpoint_with_a_gap(runs):
    """NeMo-RL's conversion only warns of one."""
    gap = runs.tiny.root / "gap"
    shutil.copytree(runs.tiny.base, gap)
    file = gap / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if re.search(r"\.embed(_tokens|dings)\.weight$", name))
    tensors[f"{name}_of_others"] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    for index in gap.glob("*.index.json"):
        index.unlink()
    process = runs.start(*runs.job(runs.tiny.root / "own_gap", OWN, ALONE, model=gap))
    output, _ = process.communicate(timeout=1000)
    assert process.returncode != 0
    assert f"{gap} leaves 1 parameter(s) of the model without a tensor (" in output, output[-5000:]
    assert f"1 tensor(s) without a place in the model ({name}_of_others)" in output


# what no CPU has, and what the recipes' layouts need in twice the memory of bf16
WITHOUT_A_GPU = (
    *("model.precision=fp32", "plan.peak_tflops=80", "plan.memory_reserve=0"),
    *("train.precision_aware_optimizer=false", "train.optimizer_offload=false"),
    *("train.recompute=full", "++nemo_rl.policy.megatron_cfg.moe_permute_fusion=false"),
    "++nemo_rl.policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",  # references
)
REHEARSED = 3  # steps


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", OF_THE_PAPER)
def test_a_setting_trains_on_nemo_rl(recipe, pinned, tmp_path):
    done = subprocess.run(
        [
            *(*rl.CLI, "rehearse", f"recipe={recipe}", "launcher=nemo_rl", "arms=[no_replay,rod]"),
            *(
                f"run_dir={tmp_path / 'run'}",
                "rehearsal.processes=2",
                f"rehearsal.steps={REHEARSED}",
            ),
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
        assert len(rl.records(folder / "arms" / arm)) == REHEARSED
        assert (folder / "arms" / arm / "evaluation.json").exists()
