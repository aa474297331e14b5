"""NeMo 2.x's own `llm.pretrain`, before and after the selector is swapped in: make test-nemo2."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from places import ROOT, WORKERS
from swap_in_oracle import BATCH, MULTIPLIER, Jobs, answers

from nemo_rod.loggers import known_metrics

pytestmark = pytest.mark.nemo2

STEPS = 8


class NemoJobs(Jobs):
    """Runs jobs of the worker."""

    def run(
        self, name: str, kind: str, *, processes: int = 1, fails: bool = False, **job: Any
    ) -> None:
        job = {"root": str(self.root), "name": name, "kind": kind, "steps": STEPS, **job}
        target = ("nemo2", WORKERS / "nemo2_worker.py", json.dumps(job))
        self.on_cpu(processes, *target, path=str(ROOT), timeout=900, expect_failure=fails)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> NemoJobs:
    """A base of the old corpus, a specialist of the new one, both references, and the job."""
    jobs = NemoJobs(tmp_path_factory.mktemp("nemo2"), torchrun)
    jobs.make_data()
    jobs.run("base", "stock", corpora=["old"])
    jobs.run("specialist", "stock", corpora=["new"], base="base")
    jobs.run("refs_new", "score", role="adaptation", base="specialist")
    jobs.run("refs_old", "score", role="replay", base="base")
    jobs.run("stock", "stock", base="base")
    jobs.run("rod", "joint", base="base")
    return jobs


def test_taking_all_is_the_stock_job(jobs: NemoJobs) -> None:
    jobs.run("take_all", "take_all", base="base")
    assert jobs.steps("stock", "step") == list(range(STEPS))
    jobs.assert_same_steps("take_all", "stock", "step", "loss", "grad_norm", "read")


def test_rod_selects_in_training_and_not_in_validation(jobs: NemoJobs) -> None:
    stock, rod = jobs.steps("stock", "read")[-1], jobs.steps("rod", "read")[-1]
    micro_batches = STEPS * BATCH // 2
    assert len(rod["training"]) == len(stock["training"]) == micro_batches
    # of the candidates, and of held-out samples at the start and after 4 and 8 steps
    held_out, rest = divmod(len(rod["scoring"]) - MULTIPLIER * micro_batches, 3)
    assert held_out > 0 and rest == 0
    assert "scoring" not in stock
    assert rod["validation"] == stock["validation"]
    assert len(rod["validation"]) > 0


def test_the_job_trains_on_the_top_of_its_pools(jobs: NemoJobs) -> None:
    jobs.assert_trained_on_the_top("rod", steps=STEPS)
    jobs.assert_watched("rod", every=4)


def test_its_metrics_are_in_the_loggers_of_the_trainer(jobs: NemoJobs) -> None:
    shown = [json.loads(line) for line in (jobs.root / "rod" / "logged.jsonl").open()]
    start = {"done": 0, **known_metrics(jobs.start("rod"))}
    rows = [{"done": row["step"] + 1, **known_metrics(row)} for row in jobs.metrics("rod")]
    ours = ("done", "at_a_glance/", "rod_by_source/")
    expected = [{name: v for name, v in row.items() if name.startswith(ours)} for row in rows]
    assert [line for line in shown if len(line) > 1] == [start, *expected]


def test_two_replicas(jobs: NemoJobs) -> None:
    for name, kind in (("stock_dp2", "stock"), ("take_all_dp2", "take_all"), ("rod_dp2", "joint")):
        jobs.run(name, kind, base="base", processes=2)
    jobs.assert_same_steps("take_all_dp2", "stock_dp2", "loss", "grad_norm", "read")
    jobs.assert_same_choices("rod_dp2", "rod", "loss", "grad_norm")


def test_a_killed_job_repeats_and_skips_nothing(jobs: NemoJobs) -> None:
    jobs.run("killed", "joint", base="base", die_at=5, fails=True)
    jobs.run("killed", "joint", base="base")
    jobs.assert_resumed("killed", "rod", steps=[*range(6), *range(4, STEPS)], repeated=4)


def test_a_job_goes_on_with_the_selector(jobs: NemoJobs) -> None:
    """From a checkpoint without it: the pools are those of the same steps of a whole run."""
    jobs.run("adopted", "stock", base="base", die_at=5, fails=True)
    jobs.run("adopted", "joint", base="base")
    assert jobs.steps("adopted", "step") == [*range(6), *range(4, STEPS)]
    whole, adopted = jobs.curriculum("rod"), jobs.curriculum("adopted")
    assert adopted.step.tolist() == list(range(4, STEPS))
    assert (adopted.block_ids == whole.block_ids[4:]).all()


def test_refusals(jobs: NemoJobs) -> None:
    """Sentences, from the objects that a job is made of; see nemo2_refusals.py."""
    target = WORKERS / "nemo2_refusals.py"
    messages = answers(
        jobs.on_cpu(1, "nemo2", target, jobs.root / "data", path=str(ROOT), timeout=600)
    )
    assert messages.pop("accepted") == ""
    for case, text in messages.items():
        assert text.count(": ") >= 1 and text.endswith("."), (case, text)
        assert case in text, (case, text)
