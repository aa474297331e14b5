"""Text tokenised by several tasks: the blocks are those of one."""

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import composed
from corpus_cases import tree
from split_texts import sources_of, write_texts

from nemo_rod.commands import run_stages
from nemo_rod.config import Domain
from nemo_rod.corpus import documents
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.lab.prepare.tasks import run_task, tasks_of
from nemo_rod.run.prepared_blocks import prepare_blocks


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def domain_of(texts: Path, keys: dict[str, Any]) -> Domain:
    return Domain(tokenizer="byte", block_size=64, sources=sources_of(texts, **keys))


def run_all(domain: Domain, run: Path, count: int) -> None:
    parts = run / "text_parts"
    for task in range(count):
        folders = [parts / f"{number + 1}_of_{count}" for number in range(count)]
        run_task(domain, count, folders, False, folders[task], task)


def joined(domain: Domain, run: Path) -> dict[str, str]:
    (run / "blocks.partial").mkdir(parents=True)
    prepare_blocks(domain, run / "blocks.partial")
    return tree(run / "blocks.partial")


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"dedup": True}, {"max_tokens": 20_001}, {"max_bytes": 12_345},
        {"max_documents": 150, "dedup": True}, {"subsample": 0.5}, {"document_holdout": True},
    ],
    ids=lambda keys: "-".join(keys) or "plain",
)  # fmt: skip
def test_any_number_of_tasks_makes_the_same_bytes(keys, texts, tmp_path, monkeypatch):
    domain = domain_of(texts, keys)
    expected = joined(domain, tmp_path / "one")
    read = list[int]()
    monkeypatch.setattr(
        documents.Documents, "bytes_read", lambda self: read.append(self._state["input"]) or 0
    )
    for count in (1, 3):
        run = tmp_path / str(count)
        run_all(domain, run, count)
        read.clear()
        assert joined(domain, run) == expected
        # only the file in which a cap ends a source is read again
        assert len({*read}) <= (2 if {"max_bytes", "max_documents"} & {*keys} else 0)
        assert not [*(run / "text_parts").rglob("tokens.bin")]  # they would take as much again


def test_what_no_task_has_done_is_read_and_other_settings_are_not_taken(texts, tmp_path):
    domain = domain_of(texts, {})
    expected = joined(domain, tmp_path / "one")
    folders = [tmp_path / "two" / "text_parts" / f"{number}_of_2" for number in (1, 2)]
    run_task(domain, 2, folders, False, folders[1], 1)
    run_task(domain_of(texts, {"subsample": 0.5}), 2, folders, False, folders[0], 0)
    assert joined(domain, tmp_path / "two") == expected
    run_task(domain, 2, folders, False, folders[1], 1)
    counts = next(folders[1].rglob("documents.npz"))
    with np.load(counts) as whole:
        of_a_part = {name: whole[name] for name in whole.files}
    shutil.rmtree(tmp_path / "two" / "blocks.partial")
    for change, sentence in (
        (of_a_part | {"lengths": of_a_part["lengths"][1:]}, "are of another tokens.bin"),
        (of_a_part, "is compressed"),  # of which a few kB may hold any amount
    ):
        np.savez_compressed(counts, **change) if change is of_a_part else np.savez(counts, **change)
        with pytest.raises(ValueError, match=rf"documents\.npz is damaged .*{sentence}"):
            joined(domain, tmp_path / "two")
        shutil.rmtree(tmp_path / "two" / "blocks.partial")


def test_every_file_has_one_task_and_tasks_are_of_like_size(texts):
    domain = domain_of(texts, {})
    tasks = tasks_of(domain, 3, load_tokenizer("byte"))
    files = sorted((file.spec.name, file.number) for files in tasks for file in files)
    assert files == [*(("new", n) for n in range(4)), *(("old", n) for n in range(3))]
    largest = max(file.bytes for files in tasks for file in files)
    loads = [sum(file.bytes for file in files) for files in tasks]
    assert max(loads) - min(loads) <= largest


def test_a_task_names_the_file_that_it_cannot_read(texts, tmp_path):
    (tmp_path / "f0.jsonl").write_text((texts / "f1.jsonl").read_text())
    (tmp_path / "f1.jsonl").write_text('{"text": "good"}\n{"text": \n')
    new = {"role": "adaptation", "kind": "jsonl", "files": [f"{tmp_path}/f*.jsonl"]}
    domain = Domain(tokenizer="byte", block_size=64, sources={"new": new})
    with pytest.raises(ValueError, match=r"^task \d of 2: source new: .*f1\.jsonl") as caught:
        run_all(domain, tmp_path / "run", 2)
    assert "f1.jsonl:2: not a line of JSON" in str(caught.value)


def killed_until_done(work: Callable[[], object], draw: random.Random, kills: int) -> None:
    """Begins work again, in a process of its own, after as many kills at random moments."""
    for done in range(kills + 1):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work()
                status = 0
            finally:
                os._exit(status)
        if done < kills:
            time.sleep(draw.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_kills_leave_the_same_bytes(tmp_path):
    """Of tasks, and of the join."""
    domain = domain_of(write_texts(tmp_path / "texts", 2000), {"dedup": True})
    expected = joined(domain, tmp_path / "one")
    draw, count = random.Random(5), 3
    blocks = tmp_path / "parts" / "blocks.partial"
    blocks.mkdir(parents=True)
    folders = [blocks.parent / "text_parts" / f"{n + 1}_of_{count}" for n in range(count)]
    for task, folder in enumerate(folders):
        work = functools.partial(run_task, domain, count, folders, False, folder, task)
        killed_until_done(work, draw, 4)
    killed_until_done(functools.partial(prepare_blocks, domain, blocks), draw, 6)
    assert tree(blocks) == expected


def test_the_command_runs_one_task_alone_or_all_and_the_join(monkeypatch):
    ran = []
    monkeypatch.setattr(
        run_stages, "execute", lambda _, chosen: ran.append([s.name for s in chosen])
    )
    for words in ([], ["prepare.task=2"]):
        run_stages.one_stage("prepare", composed("recipe=toy_synthetic", "prepare.nodes=2", *words))
    assert ran == [["prepare_1_of_2", "prepare_2_of_2", "prepare"], ["prepare_2_of_2"]]
