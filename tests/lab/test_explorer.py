"""The curriculum explorer's data against a plain count, its bounds, and hostile texts."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build import COUNTS, create, write_run

from nemo_rod.lab.report import build_report
from nemo_rod.lab.report.explorer import MAX_CHARACTERS, MAX_POOLED, Texts, explore
from nemo_rod.lab.report.page import render
from nemo_rod.selection import Choice, Curriculum, Pool, SourceRow
from nemo_rod.selection.curriculum.header import CurriculumHeader

pytestmark = pytest.mark.usefixtures("no_pictures")
HOSTILE = "</script><script>document.title='no'</script>\u2028 & \"quoted\" <b>"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "small", arms=("base", "rod"))


def explored(path: Path, texts: Texts | None = None) -> dict[str, Any]:
    data = explore(path, texts)
    assert data is not None
    return data


def test_counts_and_pools_are_those_of_every_candidate(run):
    path = run.folder / "arms" / "rod" / "curriculum.rod"
    data = explored(path, lambda store, ids: [f"text of {number}" for number in ids])
    names = [row[1] for row in data["sources"]]
    assert names == [name for counts in COUNTS.values() for name in counts]
    steps = run.steps["rod"]
    drawn = Counter(name for sources, _ in steps for name in sources)
    chosen = Counter(sources[place] for sources, places in steps for place in places)
    totals: Counter[str] = Counter()
    with Curriculum.open(path, read_only=True) as curriculum:
        # few candidates: every step is there
        for record, pool, (drawn_C, places) in zip(curriculum, data["pools"], steps, strict=True):
            assert pool["step"] == record.step
            assert pool["tau"] == pytest.approx(record.threshold, abs=1e-4)
            rows = pool["candidates"]
            assert [row[3] for row in rows] == sorted((row[3] for row in rows), reverse=True)
            assert Counter((row[0], row[3], names[row[4]], row[5]) for row in rows) == Counter(
                (int(number), round(float(score), 4), source, int(place in places))
                for place, (number, score, source) in enumerate(
                    zip(record.block_ids, record.score, drawn_C, strict=True)
                )
            )
            for number, loss, reference, score, *_ in rows:
                assert data["texts"][number] == f"text of {number}"
                assert loss - reference == pytest.approx(score, abs=2e-4)
            for source, score in zip(drawn_C, record.score, strict=True):
                totals[source] += float(score)
    for _, name, candidates, trained_on, mean in data["sources"]:
        assert (candidates, trained_on) == (drawn[name], chosen[name])
        assert mean == pytest.approx(totals[name] / drawn[name], abs=1e-6)


def test_another_score_leaves_the_references_unknown(tmp_path):
    header = CurriculumHeader(
        num_candidates=2, num_chosen=1, block_size=8, store="s", tokenizer="t", references="r",
        config="c", seed=0, sources=(SourceRow("new", "adaptation", 0, 2),), score="relative",
    )  # fmt: skip
    score, pool = np.array([0.5, 0.25], "f4"), Pool(0, np.arange(2), np.zeros(2, bool))
    with Curriculum.create(tmp_path / "curriculum.rod", header) as curriculum:
        curriculum.append(Choice(pool, 2 * score, score, np.array([0]), 0.5))
    data = explored(tmp_path / "curriculum.rod")
    (pool,) = data["pools"]
    assert pool["candidates"] == [[0, 1.0, None, 0.5, 0, 1], [1, 0.5, None, 0.25, 0, 0]]


def test_the_pool_shows_what_the_record_says_was_chosen(tmp_path):
    """A policy may leave the best block; blocks without a finite score are not shown."""
    rows = [SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 2)]
    ids, score = np.array([3, -1, 0, 2, 1]), np.array([0.9, -np.inf, 0.5, 0.1, -np.inf], "f4")
    with create(tmp_path / "curriculum.rod", rows, 5, 1) as curriculum:
        choice = Choice(Pool(0, ids, ids >= 2), score, score, np.array([3]), -np.inf)
        curriculum.append(choice)
    (pool,) = explored(tmp_path / "curriculum.rod")["pools"]
    assert pool["tau"] is None
    assert [(row[0], row[4], row[5]) for row in pool["candidates"]] == [
        (3, 1, 0), (0, 0, 0), (2, 1, 1),
    ]  # fmt: skip


def test_the_page_of_a_long_run_is_bounded(tmp_path):
    """Sixteen sources, 400 steps and 128 candidates, with texts of several bytes per character."""
    rows = [SourceRow(f"s{i}", "replay" if i else "adaptation", 100 * i, 100) for i in range(16)]
    path, rng = tmp_path / "curriculum.rod", np.random.default_rng(0)
    with create(path, rows, 128, 64) as curriculum:
        for step in range(400):
            ids, score = rng.integers(0, 1600, 128), rng.random(128, dtype=np.float32)
            chosen = np.sort(np.argsort(-score)[:64])
            pool = Pool(step, ids, ids >= 100)
            curriculum.append(Choice(pool, score, score, chosen, 0.5))
    data = explored(path, lambda store, ids: ["\u00e4\u6f22" * 4000 for _ in ids])
    steps = [pool["step"] for pool in data["pools"]]
    assert len(steps) == MAX_POOLED // 128 and (steps[0], steps[-1]) == (0, 399)
    assert {len(pool["candidates"]) for pool in data["pools"]} == {128}
    assert {len(text) for text in data["texts"].values()} == {MAX_CHARACTERS}
    page = render("explorer.html", data=data, recipe="long", arm="RoD", note="", pages=[])
    size = MAX_POOLED * (3 * MAX_CHARACTERS + 100) + 50_000
    assert len(page.encode()) < size < 3_000_000


def test_a_text_cannot_end_the_element_that_holds_it(run):
    stores = []

    def texts(store: str, ids: Sequence[int]) -> list[str]:
        stores.append(store)
        return [HOSTILE for _ in ids]

    build_report(run.folder, texts=texts)
    assert set(stores) == {"s"}  # the digest in the curriculum's header
    report = run.folder / "report"
    page = (report / "curriculum.html").read_text()
    assert page.count("</script>") == page.count("<script") == 2
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert set(json.loads(text)["texts"].values()) == {HOSTILE}
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert 'href="curriculum.html"' in (report / "index.html").read_text()


def test_blocks_that_cannot_be_read_leave_the_numbers(run):
    def texts(store: object, ids: object) -> list[str]:
        raise ValueError("the tokenizer is not there.")

    build_report(run.folder, texts=texts)
    page = (run.folder / "report" / "curriculum.html").read_text()
    assert "Texts are not available: the tokenizer is not there." in page
    assert '"texts":{}' in page


def test_arms_without_scores_have_no_explorer(tmp_path):
    run = write_run(tmp_path / "small", arms=("base", "no_replay"))
    build_report(run.folder)
    assert not (run.folder / "report" / "curriculum.html").exists()
    assert "curriculum.html" not in (run.folder / "report" / "index.html").read_text()


def test_a_run_under_way_has_an_explorer_already(run):
    arms = run.folder / "arms"
    (arms / "base" / "evaluation.json").unlink()
    (arms / "rod" / "evaluation.json").unlink()
    (arms / "rod").rename(arms / "rod.partial")
    assert build_report(run.folder) is None
    page = (run.folder / "report" / "curriculum.html").read_text()
    assert "of small, RoD</h1>" in page
