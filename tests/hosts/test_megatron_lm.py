"""Megatron-LM's own `pretrain_gpt.py`, before and after the selector is swapped in.

Needs a checkout of core_v0.16.1, of core_v0.19.0 or of main:
make test-megatron-lm MEGATRON_LM=<checkout>.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT, WORKERS
from swap_in_oracle import BATCH, MULTIPLIER, RECIPES, Jobs, answers

from nemo_rod.selection import References

sys.path.insert(0, str(RECIPES / "megatron_lm"))

from run import BOTH, NEW, OLD, arguments, with_lines

pytestmark = pytest.mark.megatron_lm

STEPS = 8
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
ROLES = "{0: 'adaptation', 1: 'replay'}"
FROM_BASE = "--pretrained-checkpoint base"


class ScriptJobs(Jobs):
    """Runs the script of a checkout, with lines of ours in it."""

    checkout = Path(os.environ.get("MEGATRON_LM", ""))

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
        on_path: bool = True,
    ) -> None:
        """A job that notes its steps in a folder of its name, and saves there every 4 steps.

        With the checkout on PYTHONPATH its processes need not start twice.
        """
        lines += f"\nfrom megatron_lm_watch import watch\nwatch('{name}', {die_at})\n"
        number = len(list(self.root.glob("scripts/*")))
        script = with_lines(lines, self.checkout, self.root / "scripts" / str(number))
        options = arguments(data, steps, f"{more} --save {name} --load {name}")
        options[options.index("--save-interval") + 1] = "4"
        path = os.pathsep.join(map(str, [*([self.checkout] if on_path else []), ROOT, WORKERS]))
        target = ("megatron_lm", script, *options)
        fails = die_at is not None
        self.on_cpu(processes, *target, path=path, timeout=900, expect_failure=fails)


def score_lines(role: str, checkpoint: str, out: str) -> str:
    return (
        "from nemo_rod.hosts import swap_in\n"
        f"swap_in.reference('megatron_lm', role='{role}', roles={ROLES}, "
        f"checkpoint='{checkpoint}', out='{out}')"
    )


def install_lines(options: str) -> str:
    return f"import nemo_rod\nnemo_rod.install('megatron_lm', roles={ROLES}, {options})"


WATCH = f"import nemo_rod\nnemo_rod.watch('megatron_lm', roles={ROLES})"
JOINT = install_lines("references=['refs_new', 'refs_old']")


@pytest.fixture(scope="module")
def stock(tmp_path_factory, torchrun):
    """A base of the old corpus, and the job."""
    jobs = ScriptJobs(tmp_path_factory.mktemp("megatron_lm"), torchrun)
    jobs.make_data()
    jobs.run("base", OLD, "", on_path=False)
    jobs.run("stock")
    return jobs


@pytest.fixture(scope="module")
def jobs(stock):
    """And a specialist of the new corpus, both references, and the job with RoD."""
    stock.run("specialist", NEW)
    stock.run("x", lines=score_lines("adaptation", "specialist", "refs_new"))
    stock.run("x", lines=score_lines("replay", "base", "refs_old"))
    stock.run("rod", lines=JOINT)
    return stock


def test_a_watched_job_is_the_stock_job(stock):
    stock.run("watch", lines=WATCH)
    stock.assert_same_steps("watch", "stock")
    assert stock.steps("stock", "step") == list(range(STEPS))
    stock.assert_watched("watch", every=4)


def test_the_job_trains_on_the_top_of_its_pools(jobs):
    jobs.assert_trained_on_the_top("rod", steps=STEPS)
    assert jobs.steps("rod", "loss") != jobs.steps("stock", "loss")
    jobs.assert_watched("rod", every=4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(jobs, name):
    more = f"{FROM_BASE} {LAYOUTS[name]}"
    for kind, lines in (("stock", ""), ("watch", WATCH), ("rod", JOINT)):
        jobs.run(f"{kind}_{name}", more=more, processes=2, lines=lines)
    jobs.assert_same_steps(f"watch_{name}", f"stock_{name}")
    jobs.assert_same_choices(f"rod_{name}", "rod", "grad_norm")


def test_tensor_parallel_ranks_score_the_same(jobs):
    lines = score_lines("replay", "base", "refs_tp2")
    jobs.run("x", more=LAYOUTS["tp2"], processes=2, lines=lines)
    half = MULTIPLIER * STEPS * BATCH // 2
    one, other = (
        References.open([jobs.root / name]).losses(np.arange(half, 2 * half))
        for name in ("refs_old", "refs_tp2")
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_killed_job_repeats_and_skips_nothing(jobs):
    jobs.run("killed", lines=JOINT, die_at=5)
    jobs.run("killed", lines=JOINT)
    jobs.assert_resumed("killed", "rod", steps=[*range(6), *range(4, STEPS)], repeated=4)


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
    "cuda_graph_impl": "cuda_graph_impl='local'.*'transformer_engine' or 'none'",
    "context_parallel_size": "^$",
    "dataloader_type": (
        "--dataloader-type='cyclic': it reads in an order of its own; set it to 'single'"
    ),
    "data_path": "data/other.*whether it is adaptation or replay",
    "twice": "installed already: uninstall",
    "other version": r"^megatron.training.training.train_step takes \(model\) in Megatron-LM .*"
    r"expected \(\*, data_iterator, forward_backward_func\)",
}


def test_refusals(jobs):
    target = ("megatron_lm", WORKERS / "megatron_lm_refusals.py", *arguments(BOTH, STEPS, ""))
    messages = answers(jobs.on_cpu(1, *target, path=f"{ROOT}:{jobs.checkout}", timeout=600))
    assert set(messages) == set(SENTENCES)
    for case, pattern in SENTENCES.items():
        assert re.search(pattern, messages[case]), (case, messages[case])
