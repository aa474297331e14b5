"""Ranks of one job agree on results, losses and choices."""

import json
from typing import Any

import pytest
from places import WORKERS
from tiny import Torchrun

WORKER = WORKERS / "ranks_worker.py"


@pytest.fixture(scope="module")
def ranks(torchrun: Torchrun) -> list[dict[str, Any]]:
    """The line of each of two tensor-parallel ranks."""
    outputs = [output.splitlines() for output in torchrun(2, WORKER, timeout=120)]
    return [json.loads(next(line for line in lines if line[:1] == "{")) for lines in outputs]


def test_every_rank_learns_what_the_recorder_finds(ranks: list[dict[str, Any]]) -> None:
    assert [rank["agreed"]["result"] for rank in ranks] == [{"rank": 1}] * 2


def test_ranks_agree_without_room_for_the_answers_of_all(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        agreed = rank["agreed"]
        assert agreed["any"] == ["rank 1 lacks it"]
        assert agreed["all"] == [True, False, False]
        assert agreed["none fails"] == number
        for case in ("one fails", "the recorder fails"):
            assert "No space left on device: 'curriculum.rod'" in agreed[case]


def test_only_the_first_rank_of_a_node_reads_ahead(ranks: list[dict[str, Any]]) -> None:
    assert [rank["agreed"]["worked"] for rank in ranks] == [[0], []]


def test_ranks_choose_the_same_by_losses_that_differ_in_a_bit(ranks: list[dict[str, Any]]) -> None:
    assert [rank["one ulp"] for rank in ranks] == [[0, 1]] * 2


@pytest.mark.parametrize("host", ["own_job", "nemo_rl_worker"])
def test_different_choices_end_the_run_everywhere(ranks: list[dict[str, Any]], host: str) -> None:
    for rank in ranks:
        assert rank["refused"][host].startswith("step 3: ranks chose different blocks")
