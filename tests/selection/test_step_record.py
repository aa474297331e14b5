"""The files of a swapped-in job that resumes, and of one that begins again in the same folder."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rod.cli import path_parser
from nemo_rod.lab.report.job_folder import build_job_report
from nemo_rod.selection import Curriculum, CurriculumHeader, Joint, Pool, SourceRow, choose
from nemo_rod.selection.curriculum.job_record import JobRecord

SOURCES = (SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 2))
HEADER = CurriculumHeader(
    num_candidates=4, num_chosen=2, block_size=64, store="s", tokenizer="t", references="r",
    config="c", seed=0, sources=SOURCES,
)  # fmt: skip


def run(
    folder: Path,
    *steps: int,
    header: CurriculumHeader = HEADER,
    held_out: str = "h",
    loss: float = 2.0,
    former: Path | None = None,
) -> list[float | None]:
    """A job that trains these steps, and is killed or ends; its forgetting after each of them."""
    record = JobRecord(folder, header, step=steps[0], steps=9, held_out=held_out, former=former)
    if record.is_new and held_out:
        record.begin({"validation/replay/old/loss": loss})
    forgetting = []
    for step in steps:
        count = header.num_candidates
        pool = Pool(step, np.arange(count), np.arange(count) > 1)
        nats, reference = np.arange(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
        choice = choose(pool, Joint(), header.num_chosen, nats, reference)
        record.chosen(choice)
        metrics = {"validation/replay/old/loss": loss + step} if held_out else {}
        row = record.ended(choice, 2 + sum(choice.seconds.values()), metrics)
        forgetting.append(row.get("validation/forgetting"))
        assert row["timing/train/update"] == pytest.approx(2)
    return forgetting


def recorded(folder: Path, suffix: str = "") -> tuple[list[int], list[int]]:
    """The steps of the curriculum and those of the metrics."""
    with Curriculum.open(folder / f"curriculum.rod{suffix}", read_only=True) as curriculum:
        steps = [record.step for record in curriculum]
    lines = (folder / f"metrics.jsonl{suffix}").read_text().splitlines()
    return steps, [json.loads(line)["step"] for line in lines]


def test_a_job_that_resumes_continues_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, 0, 1, 2) == [0, 1, 2]
    assert run(tmp_path, 2, 3) == [2, 3]
    assert recorded(tmp_path) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert len(list(tmp_path.iterdir())) == 4 and not capsys.readouterr().err


def test_forgetting_is_relative_to_the_start_of_the_same_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 0, 1)
    assert run(tmp_path, 1, held_out="") == [None]
    assert run(tmp_path, 1, 2, loss=1.0) == [0, 1]  # that of the start is 2
    assert not capsys.readouterr().err
    assert run(tmp_path, 2, held_out="other") == [None]
    assert "continues at step 2 with other held-out samples" in capsys.readouterr().err
    assert (tmp_path / "validation_start.json.1").exists()
    assert run(tmp_path, 0, 1, loss=3.0) == [0, 1]  # begins again


def test_a_job_that_was_not_watched_from_the_start_has_no_forgetting(tmp_path: Path) -> None:
    run(tmp_path, 0, 1, held_out="")
    assert run(tmp_path, 2, 3) == [None, None]


def test_forgetting_of_a_branch_counts_from_the_base_or_is_not_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (tmp_path / name / "rod" for name in "abc")
    run(a, 0, 1, 2, 3)  # of a base of loss 2
    assert run(b, 3, 4, former=a) == [3, 4]  # was 0 at the branch
    assert f"begins at step 3: its F val counts from the base, by {a}/" in capsys.readouterr().err
    assert run(b, 5, 6) == [5, 6] and run(b, 3, former=a) == [3]  # resumed, and branched again
    assert run(c, 4, former=b) == [4]  # of a branch
    results = build_job_report(c)
    assert results is not None and results["arms"]["rod"]["val_forgetting"] == 4
    # another run, of a base of loss 3, was in the folder that the branch is to write
    run(b, 0, 1, 2, loss=3.0)
    assert run(b, 2, 3, former=a) == [2, 3]
    assert recorded(b) == ([2, 3], [2, 3]) and recorded(b, ".3") == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize(("former", "held_out"), [("none", "h"), ("a", "h"), ("a", "other")])
def test_a_branch_without_the_base_says_how_to_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], former: str, held_out: str
) -> None:
    run(tmp_path / "a", 0, 1, 2)
    if held_out == "h" and former == "a":
        (tmp_path / "a" / "validation_start.json").unlink()
    branch = tmp_path / "b"
    assert run(branch, 2, 3, held_out=held_out, former=tmp_path / former) == [None, None]
    said = capsys.readouterr().err
    assert f"copy that record's files to {branch} before the job starts" in said
    results = build_job_report(branch)
    assert results is not None and results["arms"]["rod"]["val_forgetting"] is None
    assert "validation_start.json is not there" in results["notes"][-1]
    page = (branch / "report" / "index.html").read_text()
    assert "forgetting is unknown" in page


def test_a_branch_goes_on_from_a_copy_of_the_record(tmp_path: Path) -> None:
    run(tmp_path / "a", 0, 1, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert run(tmp_path / "b", 2, 3) == [2, 3]
    assert recorded(tmp_path / "b") == ([0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("first", [0, 4])
def test_a_job_that_begins_again_moves_aside_what_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    run(tmp_path, first, first + 1, held_out="h" if first == 0 else "")
    run(tmp_path, first, first + 1, first + 2, held_out="h" if first == 0 else "")
    also = " and validation_start.json.1" if first == 0 else ""
    assert capsys.readouterr().err == (  # without a checkpoint
        f"nemo-rod: the job begins at step {first} without the steps recorded in {tmp_path}: "
        f"the earlier record is now in curriculum.rod.1 and metrics.jsonl.1{also}.\n"
    )
    run(tmp_path, 0)
    assert recorded(tmp_path) == ([0], [0])
    assert recorded(tmp_path, ".1") == ([first, first + 1],) * 2
    assert recorded(tmp_path, ".2") == ([first, first + 1, first + 2],) * 2


LONGER = {
    "store": "longer",
    "references": "longer",
    "sources": (SOURCES[0], SourceRow("old", "replay", 2, 4)),
}


@pytest.mark.parametrize(
    "changed",
    [
        LONGER,
        {"num_candidates": 3},
        {"num_candidates": 6, "num_chosen": 3},
        {"references": "again"},
        {**LONGER, "seed": 1, "block_size": 32},  # other samples
    ],
)
def test_a_job_that_goes_on_longer_or_with_other_samples_begins_a_segment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any]
) -> None:
    run(tmp_path, 0, 1, 2)  # step 2 was not saved
    run(tmp_path, 2, 3, header=replace(HEADER, **changed))
    assert "continues at step 2 with other data than recorded" in capsys.readouterr().err
    run(tmp_path, 4, header=replace(HEADER, **changed))
    steps, metrics = recorded(tmp_path)
    assert (steps, metrics) == ([2, 3, 4], [0, 1, 2, 3, 4])
    with Curriculum.open(tmp_path / "curriculum.rod.1", read_only=True) as before:
        assert [record.step for record in before] == [0, 1] and before.header == HEADER


@pytest.mark.parametrize(
    ("runs", "left", "metrics"),
    [
        # from a checkpoint in the segment, or before it
        ([(0, 4, False), (4, 8, True), (6, 8, True)], [4, 5, 6, 7], 8),
        ([(0, 4, False), (4, 8, True), (2, 5, True)], [2, 3, 4], 5),
        ([(0, 4, False), (4, 8, True), (0, 2, True)], [0, 1], 2),
        ([(0, 4, False), (4, 8, True), (2, 5, False)], [2, 3, 4], 5),
        ([(4, 6, False), (6, 8, True), (5, 7, True)], [5, 6], 3),
        # steps without the selector in between
        ([(0, 2, False), (4, 6, False)], [4, 5], 4),
        ([(0, 2, False), (4, 6, True), (5, 7, True)], [4, 5, 6], 5),
    ],
)
def test_a_job_goes_on_from_whatever_checkpoint_it_has(
    tmp_path: Path, runs: list[tuple[int, int, bool]], left: list[int], metrics: int
) -> None:
    for start, stop, is_longer in runs:
        run(tmp_path, *range(start, stop), header=replace(HEADER, **LONGER if is_longer else {}))
    steps, rows = recorded(tmp_path)
    assert steps == left and len(rows) == metrics and rows == sorted(set(rows))


def test_the_files_of_another_run_are_refused_as_they_are(tmp_path: Path) -> None:
    run(tmp_path, 0, 1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for step in (0, 1):
        with pytest.raises(ValueError, match=r"curriculum\.rod was recorded with config 'c'"):
            run(tmp_path, step, header=replace(HEADER, config="another policy"))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_page_of_a_job_of_several_segments_without_adaptation_held_out(tmp_path: Path) -> None:
    for steps, changed in (((0, 1), {}), ((4, 5), LONGER), ((3, 4), LONGER)):
        run(tmp_path / "rod", *steps, header=replace(HEADER, **changed))
    options = path_parser("report").parse_args(["report", str(tmp_path)])
    options.main(options)
    page = (tmp_path / "rod" / "report" / "index.html").read_text()
    assert "no held-out loss of adaptation was measured" in page


def test_held_out_sources_that_are_not_trained_on_change_no_counts(tmp_path: Path) -> None:
    run(tmp_path, 0, 1)
    old, other = '"validation/replay/old/loss"', '"validation/replay/other/loss": 2.0, '
    for name in ("validation_start.json", "metrics.jsonl"):
        file = tmp_path / name
        file.write_text(file.read_text().replace(old, other + old))
    results = build_job_report(tmp_path)
    assert results is not None
    assert results["sources"] == {"adaptation": {"new": 2}, "replay": {"old": 2}}
    assert results["costs"]["rod"]["reference_losses"] == pytest.approx(4 / 2 / 3)
    assert results["arms"]["rod"]["val_forgetting"] == pytest.approx(0.5)  # of 1 and 0, alike


def test_the_page_of_a_job_that_diverges_has_its_curves(tmp_path: Path) -> None:
    run(tmp_path, 0, 1)
    file = tmp_path / "metrics.jsonl"
    first, last = file.read_text().splitlines()
    diverged = json.loads(last) | {"train/loss": math.nan, "validation/replay/old/loss": math.inf}
    file.write_text(f"{first}\n{json.dumps(diverged)}\n")
    assert build_job_report(tmp_path) is None
    page = (tmp_path / "report" / "index.html").read_text()
    assert '"value":2.0' in page and "NaN" not in page.partition('id="charts"')[2][:9000]


def test_a_damaged_description_of_the_job_is_named(tmp_path: Path) -> None:
    run(tmp_path, 0)
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json lacks the key 'held_out'"):
        run(tmp_path, 1)
