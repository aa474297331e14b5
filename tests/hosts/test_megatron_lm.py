"""Megatron-LM's own `pretrain_gpt.py`, before and after the selector is swapped in.

Needs a checkout of core_v0.16.1, of core_v0.19.0 or of main:
make test-megatron-lm MEGATRON_LM=<checkout>.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import ROOT, WORKERS
from swap_in_oracle import assert_trained_on_the_top

from nemo_rod.lab.tasks import merge_checkpoints
from nemo_rod.selection import Curriculum, References
from nemo_rod.selection.curriculum.log import CurriculumArrays

RECIPES = ROOT / "recipes" / "swap_in"
sys.path.insert(0, str(RECIPES / "megatron_lm"))

from run import BOTH, NEW, OLD, arguments, with_lines  # noqa: E402

pytestmark = pytest.mark.megatron_lm

STEPS, BATCH, MULTIPLIER = 8, 8, 2
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
ROLES = "{0: 'adaptation', 1: 'replay'}"
FROM_BASE = "--pretrained-checkpoint base"


class Jobs:
    """Runs the script in one folder, with lines of ours in it."""

    def __init__(self, root: Path, checkout: Path, torchrun: Callable[..., list[str]]) -> None:
        self.root, self.checkout, self.torchrun = root, checkout, torchrun

    def run(
        self,
        name: str,
        data: str = BOTH,
        more: str = FROM_BASE,
        *,
        lines: str = "",
        processes: int = 1,
        steps: int = STEPS,
        die_at: int | None = None,
        expect_failure: bool = False,
        on_path: bool = True,
    ) -> list[str]:
        """A job that notes its steps in a folder of its name, and saves there every 4 steps.

        With the checkout on PYTHONPATH its processes need not start twice.
        """
        lines += f"\nfrom megatron_lm_watch import watch\nwatch('{name}', {die_at})\n"
        number = len(list(self.root.glob("scripts/*")))
        script = with_lines(lines, self.checkout, self.root / "scripts" / str(number))
        options = arguments(data, steps, f"{more} --save {name} --load {name}")
        options[options.index("--save-interval") + 1] = "4"
        path = [*([self.checkout] if on_path else []), ROOT, WORKERS]
        return self.torchrun(
            processes,
            "nemo_rod.cpu.on_cpu",
            "megatron_lm",
            script,
            *options,
            timeout=900,
            fresh=True,
            env={"PYTHONPATH": os.pathsep.join(map(str, path))},
            cwd=self.root,
            expect_failure=expect_failure,
        )

    def steps(self, name: str, key: str) -> list[float]:
        return [json.loads(line)[key] for line in (self.root / name / "steps.jsonl").open()]

    def curriculum(self, name: str) -> CurriculumArrays:
        path = self.root / name / "rod" / "curriculum.rod"
        with Curriculum.open(path, read_only=True) as curriculum:
            return curriculum.arrays()


def score_lines(role: str, checkpoint: str, out: str) -> str:
    return (
        "from nemo_rod import swap_in\n"
        f"swap_in.reference('megatron_lm', role='{role}', roles={ROLES}, "
        f"checkpoint='{checkpoint}', out='{out}')"
    )


def install_lines(policy: str = "") -> str:
    references = "['refs_new', 'refs_old']"
    return (
        "import nemo_rod\n"
        f"nemo_rod.install('megatron_lm', roles={ROLES}, references={references}{policy})"
    )


TAKE_ALL = install_lines(", policy=nemo_rod.TakeAll(), multiplier=1").replace(
    "['refs_new', 'refs_old']", "()"
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Jobs:
    """A base of the old corpus, a specialist of the new one, and both references."""
    checkout = Path(os.environ["MEGATRON_LM"])
    jobs = Jobs(tmp_path_factory.mktemp("megatron_lm"), checkout, torchrun)
    make_data = RECIPES / "megatron_bridge" / "make_data.py"
    torchrun(
        1,
        "nemo_rod.cpu.on_cpu",
        "core",
        make_data,
        jobs.root / "data",
        timeout=900,
        fresh=True,
    )
    jobs.run("base", OLD, "", on_path=False)
    jobs.run("specialist", NEW)
    jobs.run("x", lines=score_lines("adaptation", "specialist", "refs_new"))
    jobs.run("x", lines=score_lines("replay", "base", "refs_old"))
    jobs.run("stock")
    jobs.run("rod", lines=install_lines())
    return jobs


def test_taking_all_is_the_stock_job(jobs: Jobs) -> None:
    jobs.run("take_all", lines=TAKE_ALL)
    for key in ("step", "loss", "grad_norm"):
        assert jobs.steps("take_all", key) == jobs.steps("stock", key)
    assert jobs.steps("stock", "step") == list(range(STEPS))


def test_the_job_trains_on_the_top_of_its_pools(jobs: Jobs) -> None:
    assert_trained_on_the_top(
        jobs.curriculum("rod"),
        jobs.steps("rod", "loss"),
        batch_size=BATCH,
        num_drawn=MULTIPLIER * STEPS * BATCH,
    )
    assert jobs.steps("rod", "loss") != jobs.steps("stock", "loss")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(jobs: Jobs, name: str) -> None:
    more = f"{FROM_BASE} {LAYOUTS[name]}"
    jobs.run(f"stock_{name}", more=more, processes=2)
    jobs.run(f"take_all_{name}", more=more, processes=2, lines=TAKE_ALL)
    jobs.run(f"rod_{name}", more=more, processes=2, lines=install_lines())
    for key in ("step", "loss", "grad_norm"):
        assert jobs.steps(f"take_all_{name}", key) == jobs.steps(f"stock_{name}", key)
    one, other = jobs.curriculum("rod"), jobs.curriculum(f"rod_{name}")
    assert (one.block_ids == other.block_ids).all()
    assert (one.chosen == other.chosen).all()
    np.testing.assert_allclose(one.score, other.score, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        jobs.steps(f"rod_{name}", "grad_norm"), jobs.steps("rod", "grad_norm"), rtol=1e-4
    )


def test_tensor_parallel_ranks_score_the_same(jobs: Jobs) -> None:
    lines = score_lines("replay", "base", "refs_tp2")
    jobs.run("x", more=LAYOUTS["tp2"], processes=2, lines=lines)
    half = MULTIPLIER * STEPS * BATCH // 2
    one, other = (
        References.open([jobs.root / name]).sums(np.arange(half, 2 * half))
        for name in ("refs_old", "refs_tp2")
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_job_begins_from_a_merge(jobs: Jobs) -> None:
    merge_checkpoints(jobs.root / "base", jobs.root / "specialist", jobs.root / "merged", 1.0)
    for start in ("merged", "specialist"):
        more = f"--pretrained-checkpoint {start}"
        jobs.run(f"from_{start}", more=more, steps=2)
    for key in ("loss", "grad_norm"):
        assert jobs.steps("from_merged", key) == jobs.steps("from_specialist", key)


def test_a_killed_job_repeats_and_skips_nothing(jobs: Jobs) -> None:
    jobs.run("killed", lines=install_lines(), die_at=5, expect_failure=True)
    jobs.run("killed", lines=install_lines())
    assert jobs.steps("killed", "step") == [*range(6), *range(4, STEPS)]
    whole, killed = jobs.curriculum("rod"), jobs.curriculum("killed")
    for field in ("step", "block_ids", "score", "chosen"):
        assert (getattr(whole, field) == getattr(killed, field)).all(), field
    assert jobs.steps("killed", "loss")[-4:] == jobs.steps("rod", "loss")[-4:]


SENTENCES = {
    "accepted": "^$",
    "mock_data": "--mock-data.*give --data-path",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "sft": "--sft: it packs samples",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking: it packs documents",
    "step_batch_size_schedule": "--step-batch-size-schedule",
    "rampup_batch_size": "--rampup-batch-size",
    "iterations_to_skip": "--iterations-to-skip",
    "cuda_graph_impl": "cuda_graph_impl='local'.*set cuda_graph_impl='none'",
    "context_parallel_size": "context parallel",
    "fp8": "delayed FP8 scaling",
    "moe_router_force_load_balancing": "moe_router_force_load_balancing",
    "dataloader_type": "--dataloader-type external",
    "seq_length": "--seq-length 60: expected a multiple of 8",
    "data_path": "data/other.*whether it is adaptation or replay",
    "twice": "installed already: uninstall",
    "other version": r"^megatron.training.training.train_step takes \(model\) in Megatron-LM .*"
    r"expected \(\*, data_iterator, forward_backward_func\)",
}


def test_refusals(jobs: Jobs) -> None:
    script = WORKERS / "megatron_lm_refusals.py"
    (output,) = jobs.torchrun(
        1,
        "nemo_rod.cpu.on_cpu",
        "megatron_lm",
        script,
        *arguments(BOTH, STEPS, ""),
        timeout=600,
        fresh=True,
        env={"PYTHONPATH": f"{ROOT}:{jobs.checkout}"},
        cwd=jobs.root,
    )
    (line,) = (line for line in output.splitlines() if line.startswith("SAID "))
    said = json.loads(line.removeprefix("SAID "))
    assert set(said) == set(SENTENCES)
    for case, pattern in SENTENCES.items():
        assert re.search(pattern, said[case]), (case, said[case])
