"""The parts of a swapped-in selector that need no job: roles, names, and the pool's order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import WORKERS

from nemo_rod.hosts import swap_in
from nemo_rod.hosts.swap_in.job import SelectingJob
from nemo_rod.hosts.swap_in.roles import assign_roles, name_sources

PATHS = ["/data/legal/a_text_document", "/data/legal/old/b_text_document", "/data/web"]


def test_roles_by_number_go_before_the_longest_path() -> None:
    roles = {"/data/legal": "adaptation", "/data/legal/old": "replay", "/data/web": "replay"}
    assert assign_roles(PATHS, roles) == ["adaptation", "replay", "replay"]
    by_number = {0: "replay", "/data": "adaptation"}
    assert assign_roles(PATHS, by_number) == ["replay", "adaptation", "adaptation"]


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        ({"/data/legal": "adaptation"}, r"/data/web \(number 2 of its blend\)"),
        # a name that only begins alike is not a folder above
        ({"/data/legal": "adaptation", "/data/we": "replay"}, "/data/web"),
        ({"/data": "adaptation", "/other": "replay"}, "'/other'.*no source"),
        ({"/data": "adaptation", 3: "replay"}, r"roles\[3\].*no source"),
        ({"/data": "new"}, "'new': expected 'adaptation' or 'replay'"),
    ],
)
def test_roles_that_do_not_fit_are_refused(roles: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        assign_roles(PATHS, roles)


def test_a_policy_that_a_resumed_job_could_not_recognise_is_refused() -> None:
    policy: Any = type("Newest", (), {"needs_scores": False})()
    with pytest.raises(ValueError, match=r"^Newest has no __repr__, .*: make it a dataclass"):
        SelectingJob(roles={}, multiplier=1, policy=policy)


def test_the_former_name_of_reference_works_and_says_the_new_one() -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"score is now called swap_in\.reference"),
        pytest.raises(ValueError, match="'none' names none of the hosts"),
    ):
        swap_in.score("none")


def test_sources_are_named_by_what_tells_them_apart() -> None:
    assert name_sources(["/a/legal", "/b/web"]) == ["legal", "web"]
    for folder in ("/a", "/moved/to"):
        paths = [f"{folder}/legal/text", f"{folder}/web/text"]
        assert name_sources(paths) == ["legal/text", "web/text"]
    with pytest.raises(ValueError, match="twice"):
        name_sources(["/a/legal", "/a/legal"])


@given(
    replicas=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    drawn=st.integers(1, 4),
    data=st.data(),
)
def test_pool_order_is_that_of_one_process(
    replicas: int, micro_batch_size: int, drawn: int, data: st.DataObject
) -> None:
    from nemo_rod.hosts.swap_in.stream import in_pool_order, place

    # what Megatron's sampler gives: micro-batch after micro-batch, dealt out to the replicas
    stream = np.arange(drawn * replicas * micro_batch_size)
    by_batch = stream.reshape(drawn, replicas, micro_batch_size)
    mine = np.stack([by_batch[:, r].ravel() for r in range(replicas)])
    assert in_pool_order(mine[:, :, None], micro_batch_size)[:, 0].tolist() == stream.tolist()
    position = data.draw(st.integers(0, len(stream) - 1))
    where = place(np.array([position]), micro_batch_size, replicas)
    assert mine[where.replica[0], where.row[0]] == position


def test_a_script_runs_with_the_megatron_core_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rod.cpu.on_cpu import _prefer_megatron_of

    restarts: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: restarts.append(arguments))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "code")
    _prefer_megatron_of(tmp_path)  # no megatron-core there
    assert sys.path[0] == str(tmp_path) and not restarts
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    _prefer_megatron_of(tmp_path)
    assert restarts == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}code"
    with pytest.raises(ValueError, match=r"was imported instead of.*run the script from another"):
        _prefer_megatron_of(tmp_path)


def test_winners_reach_the_replicas_that_train_on_them(torchrun: Callable[..., list[str]]) -> None:
    outputs = torchrun(3, WORKERS / "swap_in_exchange.py", timeout=300)
    assert all("PASSED" in output for output in outputs)
