"""Megatron-Bridge's own recipes, shrunk by their own keys, with the selector in them.

Each writes both references, selects for 8 steps, and does the last four of them again.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from places import WORKERS
from shipped_recipes_worker import FAMILIES, STEPS
from swap_in_oracle import BATCH, MULTIPLIER, Jobs, answers

pytestmark = pytest.mark.swap_in

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, torchrun):
    jobs = Jobs(tmp_path_factory.mktemp("shipped"), torchrun)
    jobs.make_data()
    return jobs


@pytest.fixture(scope="module")
def run(jobs):
    """Runs the worker, once, on the same data in a folder for each family."""

    @functools.cache
    def run(family: str, *layout: str, processes: int = 1) -> dict[str, Any]:
        folder = jobs.root / family
        if not folder.exists():
            folder.mkdir()
            (folder / "data").symlink_to(jobs.root / "data")
        worker = WORKERS / "shipped_recipes_worker.py"
        outputs = jobs.torchrun(processes, worker, folder, family, *layout, timeout=900)
        return answers(outputs[:1])

    return run


def assert_top_of_pools(choices: dict[str, Any]) -> None:
    """By plain arithmetic; the base's own references leave replay no score at the first step."""
    num_drawn = MULTIPLIER * STEPS * BATCH
    ids, score = np.array(choices["block_ids"]), np.array(choices["score"], np.float32)
    assert choices["step"] == list(range(STEPS))
    assert sorted(ids.ravel()) == list(range(num_drawn))
    for scores, chosen in zip(score, choices["chosen"], strict=True):
        assert np.flatnonzero(chosen).tolist() == sorted(np.argsort(-scores, kind="stable")[:BATCH])
    is_replay = ids[0] >= num_drawn // 2
    assert (score[0][is_replay] == 0).all() and (score[0][~is_replay] > 0).any()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mamba"])
def test_a_recipe_selects_and_resumes(family, run):
    choices = run(family)
    assert_top_of_pools(choices["whole"])
    assert choices["resumed"] == choices["whole"]


@pytest.mark.parametrize(("family", "layout"), [("mamba", "cp2"), ("gpt_oss", "ep2")])
def test_positions_or_experts_split_over_processes_choose_the_same(family, layout, run, jobs):
    """And TakeAll is the stock job there. Context parallelism is of a model without attention."""
    whole = run(family)["whole"]
    assert_top_of_pools(whole)
    split = run(family, layout, processes=2)
    assert split["block_ids"] == whole["block_ids"]
    np.testing.assert_allclose(split["score"], whole["score"], rtol=0, atol=1e-5)
    assert split["chosen"] == whole["chosen"]
    jobs.assert_same_steps(f"{family}/take_all_{layout}", f"{family}/stock_{layout}")
