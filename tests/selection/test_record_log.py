"""The record log at every byte where it may be cut or flipped.

Writers are killed in test_curriculum.py, and in test_references.py without waiting for the disk.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from nemo_rod.selection.curriculum.record_log import RecordLog

MAGIC = b"TESTLOG1"
SIZE = 20  # bytes of a record, 16 of them its own


def payload(first: int, count: int) -> np.ndarray:
    rows = np.arange(first, first + count, dtype="<u8")
    return np.stack([rows, rows * rows], axis=1).view(np.uint8)


def write_log(path, count):
    RecordLog.create(path, MAGIC, {"name": "ß", "n": [1, 2]}, SIZE)
    log = RecordLog(path, MAGIC)
    log.recover()
    log.append(payload(0, count), sync=True)
    log.close()
    return path.read_bytes()


def test_what_is_appended_is_read(tmp_path):
    write_log(tmp_path / "log", 5)
    log = RecordLog(tmp_path / "log", MAGIC)
    assert log.header == {"name": "ß", "n": [1, 2]}
    assert log.recover().tolist() == [True] * 5
    log.append(payload(5, 3), sync=False)
    assert log.count == 8
    assert np.array_equal(log.payload(), payload(0, 8))
    log.truncate(2)
    log.append(payload(2, 1), sync=True)
    log.close()
    log.close()
    assert (tmp_path / "log").read_bytes() == write_log(tmp_path / "again", 3)


def test_cut_at_every_byte(tmp_path):
    whole = write_log(tmp_path / "log", 3)
    start = len(whole) - 3 * SIZE
    path = tmp_path / "cut"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end < start:  # a header is moved into place whole, so this is no crash of ours
            with pytest.raises(ValueError, match=r"damaged header|begins with"):
                RecordLog(path, MAGIC)
            continue
        left = (end - start) // SIZE
        reader = RecordLog(path, MAGIC, read_only=True)
        assert reader.recover().tolist() == [True] * left
        assert path.read_bytes() == whole[:end]  # reading changes nothing
        log = RecordLog(path, MAGIC)
        assert log.recover().tolist() == [True] * left
        log.append(payload(left, 3 - left), sync=True)
        log.close()
        reader.close()
        assert path.read_bytes() == whole


def test_every_flipped_bit_is_noticed(tmp_path):
    whole = write_log(tmp_path / "log", 3)
    start = len(whole) - 3 * SIZE
    path = tmp_path / "flipped"
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        if bit // 8 < start:
            with pytest.raises(ValueError, match=r"damaged header|begins with"):
                RecordLog(path, MAGIC)
            continue
        log = RecordLog(path, MAGIC, read_only=True)
        # The last record is taken for a torn one.
        left = {0: [False, True, True], 1: [True, False, True], 2: [True, True]}
        assert log.recover().tolist() == left[(bit // 8 - start) // SIZE]
        log.close()


@pytest.mark.parametrize("end", [bytes(SIZE * 3), b"\xff" * (SIZE + 7), bytes(5)])
def test_rubbish_at_the_end_is_dropped(tmp_path, end):
    whole = write_log(tmp_path / "log", 2)
    (tmp_path / "log").write_bytes(whole + end)
    log = RecordLog(tmp_path / "log", MAGIC)
    assert log.recover().tolist() == [True, True]
    log.close()
    assert (tmp_path / "log").read_bytes() == whole


def test_a_log_that_another_process_changed_is_left_alone(tmp_path):
    write_log(tmp_path / "log", 2)
    one, two = RecordLog(tmp_path / "log", MAGIC), RecordLog(tmp_path / "log", MAGIC)
    one.recover()
    two.recover()
    two.append(payload(2, 1), sync=True)
    with pytest.raises(ValueError, match="another one writes to it: run one job per folder"):
        one.append(payload(2, 1), sync=True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: check the path"),
        (b"Good morning, no log.", r"begins with b'Good mor', expected b'TESTLOG1'"),
        (b"", "begins with b''"),
    ],
)
def test_files_that_are_no_log(tmp_path, content, sentence):
    path = tmp_path / "log"
    if content is not None:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="exists: open it to resume, or remove it"):
            RecordLog.create(path, MAGIC, {}, SIZE)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match=sentence):
        RecordLog(path, MAGIC)


DISK_FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from nemo_rod.selection.curriculum.record_log import RecordLog
log = RecordLog(Path(sys.argv[1]), b"TESTLOG1")
log.recover()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    log.append(np.zeros((3, 16), dtype=np.uint8), sync=True)
except OSError as error:
    print(type(error).__name__, log.count)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit on the size of files")
def test_a_full_disk_leaves_the_log_as_it_was(tmp_path):
    whole = write_log(tmp_path / "log", 2)
    size = str(len(whole) + 30)  # room for one record and a half
    command = [sys.executable, "-c", DISK_FULL, str(tmp_path / "log"), size]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["OSError", "2"]
    assert (tmp_path / "log").read_bytes() == whole
