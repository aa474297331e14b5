"""Files are read with one sentence about what is wrong with them."""

import re

import pytest

from nemo_rod.files import read_json, read_lines, write_whole
from nemo_rod.run.stage_log import StageLog
from nemo_rod.selection.curriculum.journal import read_rows


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": ', r"is damaged \(not valid JSON: Expecting value: line 1 column 7"),
        ("", r"is damaged \(not valid JSON"),
        ("[" * 10**5, r"is damaged \(not valid JSON"),
        ("[1]", "holds no JSON object"),
        ('{"b": 1}', r"lacks the key 'a', found \['b'\]"),
    ],
)
def test_damaged_json_is_named(tmp_path, text, sentence):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))} {sentence}"):
        read_json(file, "a")
    file.write_bytes(b'\xff{"a": 1}')
    with pytest.raises(ValueError, match=r"is damaged \(not valid JSON"):
        read_json(file, "a")


def test_last_line_may_be_cut_and_no_other(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_lines(file) == read_rows(file) == [{"step": 0}, {"step": 1}]
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no JSON in line 2"):
        read_lines(file)


def test_record_that_was_cut_goes_on(tmp_path):
    record = StageLog(tmp_path, "rod")
    with record.only_one(), record.attempt():
        pass
    with record.path.open("a") as file:
        file.write('{"time": 17953')
    assert [event["event"] for event in record.events()] == ["began", "done"]
    with record.attempt():
        pass
    assert [event["event"] for event in record.events()] == ["began", "done"] * 2


@pytest.mark.parametrize("time", ["-1", "1e17", "NaN", '"now"', "null"])
def test_times_that_are_no_dates_are_damage(tmp_path, time):
    record = StageLog(tmp_path, "rod")
    record.path.parent.mkdir(parents=True)
    record.path.write_text(f'{{"time": {time}, "event": "done"}}\n')
    with pytest.raises(ValueError, match=r"rod\.jsonl is damaged .* or remove line 1"):
        record.events()


def test_variables_of_an_allocation_count_only_in_its_steps(tmp_path, monkeypatch):
    record = StageLog(tmp_path, "rod")
    record.path.parent.mkdir(parents=True)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    left = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "elsewhere[1-2]"}
    steps: list[dict[str, str]] = [{}, {"SLURM_STEP_ID": "0"}]
    for number, step in enumerate(steps):
        for name, value in {**left, **step}.items():
            monkeypatch.setenv(name, value)
        with record.attempt():
            pass
        began = record.events()[2 * number]
        assert began.get("nodes") == (left["SLURM_JOB_NODELIST"] if step else None)


def test_a_whole_file_or_none(tmp_path):
    write_whole(tmp_path / "folder" / "file", b"one")
    write_whole(tmp_path / "folder" / "file", b"two")
    assert [p.read_bytes() for p in (tmp_path / "folder").iterdir()] == [b"two"]
