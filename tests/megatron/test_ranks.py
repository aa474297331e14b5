"""Ranks of one job agree on results, losses and choices."""

import pytest
from places import WORKERS
from tiny import printed


@pytest.fixture(scope="module")
def ranks(torchrun):
    """The line of each of two tensor-parallel ranks."""
    outputs = torchrun(2, WORKERS / "ranks_worker.py", timeout=120)
    return [row for output in outputs for row in printed(output)]


def test_ranks_agree_without_room_for_the_answers_of_all(ranks):
    for number, rank in enumerate(ranks):
        agreed = rank["agreed"]
        assert agreed["result"] == {"rank": 1}  # the recorder's
        assert agreed["any"] == ["rank 1 lacks it"]
        assert agreed["all"] == [True, False, False]
        assert agreed["none fails"] == number
        for case in ("one fails", "the recorder fails"):
            assert "No space left on device: 'curriculum.rod'" in agreed[case]
        assert agreed["worked"] == [0][number:]  # the first rank of a node alone


def test_ranks_that_choose_differently_end_and_others_choose_the_same(ranks):
    for rank in ranks:
        assert rank["one ulp"] == [0, 1]  # by losses that differ in a bit
        assert rank["refused"].keys() == {"own_job", "nemo_rl_worker"}
        for refusal in rank["refused"].values():
            assert refusal.startswith("step 3: ranks chose different blocks")
