"""The files of a swapped-in job that resumes, and of one that begins again in the same folder."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from nemo_rod.cli import path_parser
from nemo_rod.hosts.job_record import JobRecord
from nemo_rod.lab.report.job_folder import build_job_report
from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Joint, Pool, SourceRow, choose
from nemo_rod.selection.curriculum.journal import read_rows
from nemo_rod.selection.held_out import START_FILE
from nemo_rod.selection.schedule import Schedule

pytestmark = pytest.mark.usefixtures("no_pictures")
SOURCES = (SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 2))
HEADER = CurriculumHeader(
    num_candidates=4, num_chosen=2, block_size=64, store="s", tokenizer="t", references="r",
    config="c", seed=0, sources=SOURCES,
)  # fmt: skip


def choice_of(step: int, header: CurriculumHeader = HEADER) -> Choice:
    pool = Pool(step, np.arange(count := header.num_candidates), np.arange(count) > 1)
    nats, reference = np.arange(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
    return choose(pool, Joint(), header.num_chosen, nats, reference)


def begun(
    folder: Path, step: int, *, header: CurriculumHeader = HEADER, held_out: str = "h",
    loss: float = 2.0, former: Path | None = None,
) -> JobRecord:  # fmt: skip
    record = JobRecord(folder, header, step=step, steps=9, held_out=held_out, former=former)
    if record.is_new and held_out:
        record.begin({"validation/replay/old/loss": loss})
    return record


def train(record: JobRecord, step: int, loss: float | None) -> float | None:
    """Trains a step; its forgetting."""
    choice = choice_of(step, record.header)
    record.begin_step(choice)
    metrics = {} if loss is None else {"validation/replay/old/loss": loss + step}
    row = record.end_step(choice, 2 + sum(choice.seconds.values()), metrics)
    assert row["timing/train/update"] == pytest.approx(2)
    return row.get("validation/forgetting")


def run(
    folder: Path, *steps: int, held_out: str = "h", loss: float = 2.0, **more: Any
) -> list[float | None]:
    """A job that trains these steps, and is killed or ends; its forgetting after each of them."""
    record = begun(folder, steps[0], held_out=held_out, loss=loss, **more)
    return [train(record, step, loss if held_out else None) for step in steps]


def recorded(folder: Path, suffix: str = "") -> tuple[list[int], list[int]]:
    """The steps of the curriculum and those of the metrics."""
    with Curriculum.open(folder / f"curriculum.rod{suffix}", read_only=True) as curriculum:
        steps = [record.step for record in curriculum]
    return steps, [row["step"] for row in read_rows(folder / f"metrics.jsonl{suffix}")]


LONGER = {
    "store": "longer",
    "references": "longer",
    "sources": (SOURCES[0], SourceRow("old", "replay", 2, 4)),
}
GROWN = (  # more steps or other batches; other samples
    *({}, LONGER, {"num_candidates": 3}, {"num_candidates": 6, "num_chosen": 3}),
    *({"references": "again"}, {**LONGER, "seed": 1, "block_size": 32}),
)


class Recording(stateful.RuleBasedStateMachine):
    """Jobs that begin, go on, are killed and begin again in one folder, beside what is left."""

    folder: Path

    @stateful.initialize()
    def begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.first, self.count, self.changed = -1, 0, dict[str, Any]()  # of the curriculum
        self.rows, self.aside = list[int](), list[list[int]]()
        self.start, self.held_out = None, ""

    @stateful.rule(
        step=st.integers(0, 7), count=st.integers(0, 3), changed=st.sampled_from(GROWN),
        held_out=st.sampled_from(["h", "h", "other", ""]), loss=st.sampled_from([1.0, 2.0]),
        killed=st.booleans(),
    )  # fmt: skip
    def run(
        self, step: int, count: int, changed: Any, held_out: str, loss: float, killed: bool
    ) -> None:
        firsts = self.rows[:1] + [self.first] * bool(self.count)
        begins, there = not firsts or min(firsts) >= step, self.first + self.count
        if firsts and begins:
            self.aside.append([*range(self.first, there)])
            self.first, self.rows, self.start = -1, [], None
        elif self.first >= 0 and (changed != self.changed or not self.first <= step <= there):
            kept = min(step, there)
            self.aside.append([*range(self.first, kept if kept >= self.first else there)])
            self.first = -1
        if begins or (held_out and held_out != self.held_out):
            self.start = None
        self.held_out = held_out or self.held_out
        if self.first < 0:
            self.first, self.changed = step, changed
        self.count = step - self.first
        rows = [row for row in self.rows if row < step]
        header = replace(HEADER, **changed)
        if self.count and rows[-1:] != [step - 1]:
            end = f"ends with step {rows[-1]}" if rows else "has no earlier step"
            with pytest.raises(ValueError, match=rf"metrics\.jsonl {end}, but .* to step {step} "):
                JobRecord(self.folder, header, step=step, steps=9, held_out=held_out)
            return
        if step == 0 and held_out:
            self.start = loss
        record = begun(self.folder, step, header=header, held_out=held_out, loss=loss)
        for now in range(step, step + count):
            forgetting = train(record, now, loss=loss if held_out else None)
            known = held_out and self.start is not None
            assert forgetting == (max(0.0, loss + now - self.start) if known else None)
        self.rows = [*rows, *range(step, step + count)]
        self.count += count
        if killed:
            record.begin_step(choice_of(step + count, header))
            self.count += 1
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write('{"st')

    @stateful.rule(left=st.integers(0, 9))
    def lose_metrics(self, left: int) -> None:
        file = self.folder / "metrics.jsonl"
        if file.exists():
            self.rows = self.rows[:left]
            file.write_text("".join(file.read_text().splitlines(keepends=True)[: len(self.rows)]))

    @stateful.rule(step=st.integers(0, 7))
    def run_another_policy(self, step: int) -> None:
        if self.first >= 0:
            before = {file.name: file.read_bytes() for file in self.folder.iterdir()}
            with pytest.raises(ValueError, match=r"curriculum\.rod was recorded with config 'c'"):
                run(self.folder, step, header=replace(HEADER, config="another policy"))
            assert {file.name: file.read_bytes() for file in self.folder.iterdir()} == before

    @stateful.invariant()
    def nothing_is_lost(self) -> None:
        if self.first >= 0:
            files = [*self.folder.glob("curriculum.rod.*")]
            aside = [recorded(self.folder, file.suffix)[0] for file in files]
            assert sorted(aside) == sorted(self.aside)
            chosen, rows = recorded(self.folder)
            assert chosen == [*range(self.first, self.first + self.count)]
            assert rows[: len(self.rows)] == self.rows


def test_whatever_befalls_a_job_its_record_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody takes the power off
    machine = type("Machine", (Recording,), {"folder": tmp_path / "job"})
    stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=12)
    )


def test_what_is_moved_aside_is_said(tmp_path, capsys):
    run(tmp_path, 0, 1)
    run(tmp_path, 2)
    assert len([*tmp_path.iterdir()]) == 4 and not capsys.readouterr().err
    for step, options, sentence in (
        (2, {"held_out": "other"}, "continues at step 2 with other held-out samples than recorded "
         f"in {tmp_path}: the earlier record is now in validation_start.json.1."),
        (2, {"header": replace(HEADER, **LONGER)}, "continues at step 2 with other data than "
         f"recorded in {tmp_path}: the earlier record is now in curriculum.rod.1."),
        (4, {"header": replace(HEADER, **LONGER)},
         f"continues at step 4, which does not follow the steps recorded in {tmp_path}: "),
        (0, {}, f"begins at step 0 without the steps recorded in {tmp_path}: the earlier record is "
         "now in curriculum.rod.3 and metrics.jsonl.3."),
    ):  # fmt: skip
        run(tmp_path, step, **options)
        assert sentence in (said := capsys.readouterr().err) and said.count("\n") == 1, said
    assert recorded(tmp_path, ".3")[1] == [0, 1, 2, 4]


def test_forgetting_of_a_branch_counts_from_the_base_or_is_not_stated(tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("former", "held_out"), [("none", "h"), ("a", "h"), ("a", "other"), ("b", "h")]
)
def test_a_branch_without_the_base_says_how_to_have_it(tmp_path, capsys, former, held_out):
    run(tmp_path / "a", 0, 1, 2)
    if held_out == "h" and former == "a":
        (tmp_path / "a" / "validation_start.json").unlink()
    branch = tmp_path / "b"
    if former == "b":  # its own first steps, without held-out samples
        run(branch, 0, 1, held_out="")
    assert run(branch, 2, 3, held_out=held_out, former=tmp_path / former) == [None, None]
    said = capsys.readouterr().err
    assert f"copy that record's files to {branch} before the job starts" in said
    results = build_job_report(branch)
    assert results is not None and results["arms"]["rod"]["val_forgetting"] is None
    assert "validation_start.json is not there" in results["notes"][-1]
    page = (branch / "report" / "index.html").read_text()
    assert "forgetting is unknown" in page


def test_the_page_of_a_job_of_several_segments_without_adaptation_held_out(tmp_path):
    for steps, changed in (((0, 1), {}), ((4, 5), LONGER), ((3, 4), LONGER)):
        run(tmp_path / "rod", *steps, header=replace(HEADER, **changed))
    options = path_parser("report").parse_args(["report", str(tmp_path)])
    options.main(options)
    page = (tmp_path / "rod" / "report" / "index.html").read_text()
    assert (
        "RoD has an unknown held-out loss on new text and a forgetting F<sub>val</sub> of" in page
    )


def test_the_report_of_a_job_writes_the_schedule_that_judges_it(tmp_path):
    folder = tmp_path / "today's"
    folder.mkdir()
    run(folder, 0, 1)
    results = build_job_report(folder)
    file = folder / "report" / "tables" / "schedule_like_rod.csv"
    assert results is not None and f'Schedule(file="{file}")' in " ".join(results["notes"])
    random = Schedule(file=str(file))
    for step, record in enumerate(Curriculum.open(folder / "curriculum.rod", read_only=True)):
        pool = Pool(step, record.block_ids, HEADER.is_replay(record.block_ids))
        chosen = record.block_ids[random.select(pool, None, HEADER.num_chosen)]
        assert HEADER.is_replay(chosen).sum() == HEADER.is_replay(record.trained_on).sum()
        assert step == record.step


def test_held_out_sources_that_are_not_trained_on_change_no_counts(tmp_path):
    run(tmp_path, 0, 1)
    old, other = '"validation/replay/old/loss"', '"validation/replay/other/loss": 2.0, '
    for name in ("validation_start.json", "metrics.jsonl"):
        file = tmp_path / name
        file.write_text(file.read_text().replace(old, other + old))
    results = build_job_report(tmp_path)
    assert results is not None
    assert results["sources"] == {"adaptation": {"new": 2}, "replay": {"old": 2}}
    assert results["arms"]["rod"]["val_forgetting"] == pytest.approx(0.5)  # of 1 and 0, alike


def test_the_page_of_a_job_that_diverges_has_its_curves(tmp_path):
    run(tmp_path, 0, 1)
    file = tmp_path / "metrics.jsonl"
    first, last = file.read_text().splitlines()
    diverged = json.loads(last) | {"train/loss": math.nan, "validation/replay/old/loss": math.inf}
    file.write_text(f"{first}\n{json.dumps(diverged)}\n")
    assert build_job_report(tmp_path) is None
    page = (tmp_path / "report" / "index.html").read_text()
    assert '"value":2.0' in page and "NaN" not in page.partition('id="charts"')[2][:9000]


def test_a_damaged_description_of_the_job_is_named(tmp_path):
    run(tmp_path, 0)
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json lacks the key 'held_out'"):
        run(tmp_path, 1)


@pytest.mark.parametrize("value", ['"2.0"', "null", "true", "-2.0", "1e999"])
def test_what_is_no_loss_of_the_base_is_refused_before_a_step(tmp_path, value):
    run(tmp_path / "a", *range(6))
    (tmp_path / "a" / START_FILE).write_text(f'{{"validation/replay/old/loss": {value}}}')
    for folder, more in (("b", {"former": tmp_path / "a"}), ("a", {})):
        with pytest.raises(ValueError, match="expected a loss in nats per token: restore it"):
            begun(tmp_path / folder, 6, **more)
