"""A run that was killed while it wrote the last files of a checkpoint resumes from a whole one."""

import shutil
from pathlib import Path

import pytest
from places import Later
from test_resume import assert_same_run
from tiny import LAYOUTS, STEPS

whole = Later("nemo_rod.megatron.whole_checkpoints")
TRACKER = "latest_checkpointed_iteration.txt"
WHOLE = "checkpoint: {}\ndataset: {}\nmodel: {}\ntrain: {}\n"
STATE = "latest_train_state.pt"


def checkpoints(folder: Path, *iterations: int) -> Path:
    for iteration in iterations:
        checkpoint = folder / f"iter_{iteration:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "train_state.pt").write_text(f"state {iteration}")
        (checkpoint / "run_config.yaml").write_text(WHOLE)
    (folder / STATE).write_text(f"state {iterations[-1]}")
    (folder / TRACKER).write_text(str(iterations[-1]))
    return folder


@pytest.mark.parametrize(
    ("state", "iteration", "config"),
    [
        ("state 4", "4", None), ("sta", "4", None), ("state 8", "", None), ("state 8", "8", None),
        *(("state 8", "8", content) for content in ("", WHOLE[:33], "checkpoint: {")),
    ],
)  # fmt: skip
def test_the_trackers_name_the_last_whole_checkpoint(tmp_path, state, iteration, config):
    """A kill left the state, the iteration and the configuration of step 8 so, None if missing."""
    folder = checkpoints(tmp_path / "checkpoints", 4, 8)
    (folder / STATE).write_text(state)
    (folder / TRACKER).write_text(iteration)
    if config is None:
        (folder / "iter_0000008" / "run_config.yaml").unlink()
    else:
        (folder / "iter_0000008" / "run_config.yaml").write_text(config)
    whole.name_the_last_whole(folder)
    assert ((folder / TRACKER).read_text(), (folder / STATE).read_text()) == ("4", "state 4")


def test_what_is_whole_is_left_alone(tmp_path, capsys):
    folder = checkpoints(tmp_path / "checkpoints", 4, 8, 12)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    whole.name_the_last_whole(folder)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    assert capsys.readouterr().out == ""
    whole.name_the_last_whole(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_without_a_whole_checkpoint_a_run_begins_again(tmp_path):
    folder = checkpoints(tmp_path / "checkpoints", 4)
    (folder / "iter_0000004" / "run_config.yaml").unlink()
    whole.name_the_last_whole(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"4\n", 4), (b" 4 \r\n", 4), (b"0000004", 4), (b"iter_0000004", 4), (b"4\0\0\0", 4),
        *((said, 8) for said in (b"", b"\0\0\0", b"\xff\xfe", b"6", b"-1", b"release", b"8" * 999)),
    ],
)  # fmt: skip
def test_a_tracker_that_a_person_or_a_crash_wrote(tmp_path, said, expected):
    folder = checkpoints(tmp_path / "checkpoints", 4, 8)
    (folder / TRACKER).write_bytes(said)
    whole.name_the_last_whole(folder)
    now = ((folder / TRACKER).read_text(), (folder / STATE).read_text())
    assert now == (str(expected), f"state {expected}")
    (folder / f"iter_{expected:07d}" / "train_state.pt").unlink()
    whole.name_the_last_whole(folder)
    left = {4: "", 8: "4"}[expected]
    assert ((folder / TRACKER).read_text() if left else "") == left


def iterations(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_going_back_to_an_earlier_checkpoint_keeps_later_ones_apart(tmp_path):
    folder = checkpoints(tmp_path / "checkpoints", 4, 8, 12)
    for _ in range(2):  # the second time over what the first time has left
        (folder / TRACKER).write_text("8")
        (folder / STATE).write_text("state 8")
        whole.name_the_last_whole(folder)
        assert ((folder / TRACKER).read_text(), (folder / STATE).read_text()) == ("8", "state 8")
        assert iterations(folder) == ["abandoned_0000012", "iter_0000004", "iter_0000008"]
        shutil.copytree(folder / "abandoned_0000012", folder / "iter_0000012")


@pytest.mark.parametrize("keep", [1, 2])
def test_the_trainer_keeps_what_it_saves_beside_what_a_kill_left(tmp_path, keep):
    from megatron.bridge.training.checkpointing import cleanup_old_non_persistent_checkpoint

    folder = checkpoints(tmp_path / "checkpoints", 10, 17, 20)
    for killed in ("17", "20")[-keep:]:  # while each of them was written
        (folder / f"iter_00000{killed}" / "run_config.yaml").unlink()
    whole.name_the_last_whole(folder)
    checkpoints(folder, 18)  # saved at once, near the end of the job's time
    cleanup_old_non_persistent_checkpoint(str(folder), leave_ckpt_num=keep, do_async=False)
    whole.name_the_last_whole(folder)
    assert (folder / TRACKER).read_text() == "18"
    assert iterations(folder)[-1] == "iter_0000018"


def test_a_configuration_appears_whole_or_not_at_all(tmp_path):
    class Config:
        def to_yaml(self, path: str) -> None:
            Path(path).write_text(WHOLE)
            assert not (tmp_path / "run_config.yaml").exists()

    config = Config()
    whole.write_config_whole(config)
    config.to_yaml(str(tmp_path / "run_config.yaml"))
    assert (tmp_path / "run_config.yaml").read_text() == WHOLE
    assert [file.name for file in tmp_path.iterdir()] == ["run_config.yaml"]


@pytest.mark.slow
def test_a_run_resumes_from_the_checkpoint_before_to_the_bit(tiny):
    whole, killed = tiny.root / "rod_whole", tiny.root / "rod_killed"
    for folder in (whole, killed):
        tiny.rod_run(folder, LAYOUTS["single"], checkpoint__every=10)
    shutil.rmtree(killed / "hf")
    last = max((killed / "checkpoints").glob("iter_*"))
    config = last / "run_config.yaml"
    config.write_text(config.read_text()[:6883])  # as a kill had left it
    tiny.rod_run(killed, LAYOUTS["single"], checkpoint__every=10)
    assert_same_run(whole, killed, steps=STEPS)
