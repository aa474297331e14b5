"""NeMo 2.x's own `llm.pretrain`, before and after the selector is swapped in: make test-nemo2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT, WORKERS
from swap_in_oracle import assert_trained_on_the_top

from nemo_rod.selection import Curriculum
from nemo_rod.selection.curriculum.log import CurriculumArrays

pytestmark = pytest.mark.nemo2

STEPS, BATCH, MULTIPLIER = 8, 8, 2


class Jobs:
    """Runs jobs of the worker below one folder."""

    def __init__(self, root: Path, torchrun: Callable[..., list[str]]) -> None:
        self.root, self.torchrun = root, torchrun

    def run(
        self, name: str, kind: str, *, processes: int = 1, fails: bool = False, **job: Any
    ) -> list[str]:
        job = {"root": str(self.root), "name": name, "kind": kind, "steps": STEPS, **job}
        return self.torchrun(
            processes,
            "nemo_rod.cpu.on_cpu",
            "nemo2",
            WORKERS / "nemo2_worker.py",
            json.dumps(job),
            timeout=900,
            fresh=True,
            env={"PYTHONPATH": str(ROOT)},
            cwd=self.root,
            expect_failure=fails,
        )

    def steps(self, name: str, key: str) -> list[Any]:
        return [json.loads(line)[key] for line in (self.root / name / "steps.jsonl").open()]

    def curriculum(self, name: str) -> CurriculumArrays:
        path = self.root / name / "rod" / "curriculum.rod"
        with Curriculum.open(path, read_only=True) as curriculum:
            return curriculum.arrays()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Jobs:
    """A base of the old corpus, a specialist of the new one, both references, and the job."""
    jobs = Jobs(tmp_path_factory.mktemp("nemo2"), torchrun)
    make_data = ROOT / "recipes" / "swap_in" / "megatron_bridge" / "make_data.py"
    host = ("nemo_rod.cpu.on_cpu", "core")
    torchrun(1, *host, make_data, jobs.root / "data", timeout=900, fresh=True)
    jobs.run("base", "stock", corpora=["old"])
    jobs.run("specialist", "stock", corpora=["new"], base="base")
    jobs.run("refs_new", "score", role="adaptation", base="specialist")
    jobs.run("refs_old", "score", role="replay", base="base")
    jobs.run("stock", "stock", base="base")
    jobs.run("rod", "joint", base="base")
    return jobs


def test_taking_all_is_the_stock_job(jobs: Jobs) -> None:
    jobs.run("take_all", "take_all", base="base")
    assert jobs.steps("stock", "step") == list(range(STEPS))
    for key in ("step", "loss", "grad_norm", "read"):
        assert jobs.steps("take_all", key) == jobs.steps("stock", key)


def test_rod_selects_in_training_and_not_in_validation(jobs: Jobs) -> None:
    stock, rod = jobs.steps("stock", "read")[-1], jobs.steps("rod", "read")[-1]
    micro_batches = STEPS * BATCH // 2
    assert len(rod["training"]) == len(stock["training"]) == micro_batches
    assert len(rod["scoring"]) == MULTIPLIER * micro_batches
    assert "scoring" not in stock
    assert rod["validation"] == stock["validation"]
    assert len(rod["validation"]) > 0


def test_the_job_trains_on_the_top_of_its_pools(jobs: Jobs) -> None:
    assert_trained_on_the_top(
        jobs.curriculum("rod"),
        jobs.steps("rod", "loss"),
        batch_size=BATCH,
        num_drawn=MULTIPLIER * STEPS * BATCH,
    )


def test_two_replicas(jobs: Jobs) -> None:
    for name, kind in (("stock_dp2", "stock"), ("take_all_dp2", "take_all"), ("rod_dp2", "joint")):
        jobs.run(name, kind, base="base", processes=2)
    for key in ("loss", "grad_norm", "read"):
        assert jobs.steps("take_all_dp2", key) == jobs.steps("stock_dp2", key)
    one, other = jobs.curriculum("rod"), jobs.curriculum("rod_dp2")
    assert (one.block_ids == other.block_ids).all()
    assert (one.chosen == other.chosen).all()
    np.testing.assert_allclose(one.score, other.score, rtol=0, atol=1e-5)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(jobs.steps("rod_dp2", key), jobs.steps("rod", key), rtol=1e-4)


def test_a_killed_job_repeats_and_skips_nothing(jobs: Jobs) -> None:
    jobs.run("killed", "joint", base="base", die_at=5, fails=True)
    jobs.run("killed", "joint", base="base")
    assert jobs.steps("killed", "step") == [*range(6), *range(4, STEPS)]
    whole, killed = jobs.curriculum("rod"), jobs.curriculum("killed")
    for field in ("step", "block_ids", "score", "chosen"):
        assert (getattr(whole, field) == getattr(killed, field)).all(), field
    assert jobs.steps("killed", "loss")[-4:] == jobs.steps("rod", "loss")[-4:]


def test_a_job_goes_on_with_the_selector(jobs: Jobs) -> None:
    """From a checkpoint without it, right behind what was read: 4 steps of 8 are 2 pools of 16."""
    jobs.run("adopted", "stock", base="base", die_at=5, fails=True)
    jobs.run("adopted", "joint", base="base")
    assert jobs.steps("adopted", "step") == [*range(6), *range(4, STEPS)]
    whole, adopted = jobs.curriculum("rod"), jobs.curriculum("adopted")
    assert adopted.step.tolist() == list(range(4, STEPS))
    assert (adopted.block_ids == whole.block_ids[2:6]).all()


def test_refusals(jobs: Jobs) -> None:
    """Sentences, from the objects that a job is made of; see nemo2_refusals.py."""
    target = WORKERS / "nemo2_refusals.py"
    (output,) = jobs.torchrun(
        1,
        "nemo_rod.cpu.on_cpu",
        "nemo2",
        target,
        jobs.root / "data",
        timeout=600,
        fresh=True,
        env={"PYTHONPATH": str(ROOT)},
        cwd=jobs.root,
    )
    (line,) = (line for line in output.splitlines() if line.startswith("SAID "))
    said = json.loads(line.removeprefix("SAID "))
    assert said.pop("accepted") == ""
    for case, text in said.items():
        assert text.count(": ") >= 1 and text.endswith("."), (case, text)
        assert case in text, (case, text)
