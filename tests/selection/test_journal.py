"""What a run writes down after every step, and what choosing added to it."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Joint, Pool, SourceRow, choose
from nemo_rod.selection.curriculum.journal import Journal

HEADER = CurriculumHeader(
    num_candidates=4, num_chosen=2, block_size=64, store="s", tokenizer="t", references="r",
    config="c", seed=0,
    sources=(SourceRow("new", "adaptation", 0, 2), SourceRow("old", "replay", 2, 2)),
)  # fmt: skip

# an update of 3 s, and 2 s of scoring before it: 5/3 of a plain step
SECONDS = {"timing/train/total": 5.0, "timing/train/update": 3.0}


def choice_of(step: int) -> Choice:
    pool = Pool(step, np.arange(4), np.array([False, False, True, True]))
    losses = np.array([3.0, 1.0, 2.0, 1.0], dtype=np.float32), np.zeros(4, dtype=np.float32)
    return choose(pool, Joint(), 2, *losses)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, HEADER, step=0)


@pytest.fixture
def on_fsync(tmp_path, monkeypatch):
    """Sets a function of the path that is called before every fsync within the folder."""
    fsync = os.fsync

    def install(before: Callable[[Path], None]) -> None:
        def patched(fd: int) -> None:
            path = Path(os.path.realpath(f"/proc/self/fd/{fd}"))
            if path.is_relative_to(tmp_path):
                before(path)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", patched)

    return install


def recorded(folder: Path) -> list[int]:
    with Curriculum.open(folder / "curriculum.rod", read_only=True) as curriculum:
        return [record.step for record in curriculum]


def test_a_full_disk_is_named_by_the_file_of_metrics(tmp_path, journal):
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"make room and run it again.*metrics\.jsonl"):
        journal.append(0, choice_of(0), SECONDS)


def test_overhead_is_what_choosing_adds_to_an_update(tmp_path, journal):
    row = journal.append(0, choice_of(0), SECONDS)
    assert row["rod/overhead"] == pytest.approx(2 / 3)
    assert row["rod/share/old"] == 0.5
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == row
    (record,) = Curriculum.open(tmp_path / "curriculum.rod", read_only=True)
    assert record.chosen.tolist() == [0, 2]


def test_the_disk_has_a_step_when_it_ends_and_is_not_waited_for_before(tmp_path, journal, on_fsync):
    training, synced = threading.Event(), []

    def slow_disk(path: Path) -> None:
        assert training.wait(60)
        synced.append(path)

    on_fsync(slow_disk)
    for step in (0, 1):
        training.clear()
        journal.begin(choice_of(step))  # returns although the disk is not done
        assert len(synced) == 3 * step
        assert recorded(tmp_path) == list(range(step + 1))
        training.set()
        journal.append(step, choice_of(step), SECONDS)
        journal._disk.submit(int).result()  # after all that was begun
        files = [tmp_path / name for name in ("curriculum.rod", "metrics.jsonl", "")]
        assert synced == files * (step + 1)


def test_metrics_are_on_their_way_to_the_disk_when_a_step_ends(tmp_path, journal, on_fsync):
    begun, saved = threading.Event(), threading.Event()

    def slow_disk(path: Path) -> None:
        if path.name == "metrics.jsonl":
            begun.set()
            assert saved.wait(60)

    on_fsync(slow_disk)
    journal.append(0, choice_of(0), SECONDS)  # returns although the disk is not done
    assert begun.wait(60)  # without waiting for another step
    journal.begin(choice_of(1))
    saved.set()
    journal.append(1, choice_of(1), SECONDS)


def test_a_resume_without_its_curriculum_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"curriculum.rod is missing, .* run has come to step 5"):
        Journal(tmp_path, HEADER, step=5)


@pytest.mark.parametrize(("name", "steps"), [("curriculum.rod", [0]), ("metrics.jsonl", [0, 1])])
def test_a_full_disk_ends_the_step_or_after_metrics_the_next(
    tmp_path, journal, on_fsync, name, steps
):
    def full_disk(path: Path) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    on_fsync(full_disk)
    *fine, last = steps
    for step in fine:
        journal.append(step, choice_of(step), SECONDS)
    journal.begin(choice_of(last))
    with pytest.raises(OSError, match=rf"No space left .* make room .*{name}"):
        journal.append(last, choice_of(last), SECONDS)
    # the metrics do not claim that the step has ended
    file = tmp_path / "metrics.jsonl"
    assert len(file.read_text().splitlines() if file.exists() else []) == len(fine)
