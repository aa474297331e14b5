"""The file of a curriculum at every byte where it may be cut or flipped.

Writers are killed in test_curriculum.py, and in test_references.py without waiting for the disk.
"""

from pathlib import Path

import numpy as np
import pytest
from mishaps import largest_file

from nemo_rod.selection import Choice, Curriculum, CurriculumHeader, Pool, SourceRow

HEADER = CurriculumHeader(
    num_candidates=1, num_chosen=1, block_size=8, store="ß", tokenizer="", references="", config="",
    seed=1, sources=(SourceRow("new", "adaptation", 0, 9),),
)  # fmt: skip
SIZE = 8 + 8 + 8 + 4 + 4 + 1 + 4  # bytes of a record with its checksum


def choice_of(step: int) -> Choice:
    loss = np.array([step + 0.5], dtype=np.float32)
    pool = Pool(step, np.array([step * step]), np.array([False]))
    return Choice(pool, loss, loss, np.array([0]), float(loss[0]))


def extend(curriculum: Curriculum, stop: int) -> None:
    for step in range(curriculum.next_step, stop):
        curriculum.append(choice_of(step))


def write(path: Path, steps: int) -> bytes:
    with Curriculum.create(path, HEADER) as curriculum:
        extend(curriculum, steps)
    return path.read_bytes()


def steps_of(curriculum: Curriculum) -> list[tuple[int, float]]:
    return [(record.step, record.threshold) for record in curriculum]


def test_cut_at_every_byte(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 3)
    start = len(whole) - 3 * SIZE
    path = tmp_path / "cut"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end < start:  # a header is moved into place whole, so this is no crash of ours
            with pytest.raises(ValueError, match=r"damaged header|begins with|has a header of"):
                Curriculum.open(path)
            continue
        left = [(step, step + 0.5) for step in range((end - start) // SIZE)]
        with Curriculum.open(path, read_only=True) as reader:
            assert steps_of(reader) == left
            assert path.read_bytes() == whole[:end]  # reading changes nothing
            with Curriculum.open(path) as curriculum:
                assert steps_of(curriculum) == left
                extend(curriculum, 3)
                curriculum.close()
        assert path.read_bytes() == whole


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 3)
    start = len(whole) - 3 * SIZE
    path = tmp_path / "flipped"
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        step = (bit // 8 - start) // SIZE
        if bit // 8 < start:
            with pytest.raises(ValueError, match=r"damaged header|begins with|has a header of"):
                Curriculum.open(path)
        elif step < 2:
            with pytest.raises(ValueError, match=rf"damaged record of step {step} \(checksum\) be"):
                Curriculum.open(path)
            assert path.read_bytes() == data  # nothing is dropped unasked
            with Curriculum.open(path, resume_at=step) as curriculum:
                assert len(curriculum) == step
        else:  # as after a torn write
            with Curriculum.open(path) as curriculum:
                assert steps_of(curriculum) == [(0, 0.5), (1, 1.5)]


@pytest.mark.parametrize("end", [bytes(SIZE * 3), b"\xff" * (SIZE + 7), bytes(5)])
def test_rubbish_at_the_end_is_dropped(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "c.rod"
    whole = write(path, 2)
    path.write_bytes(whole + end)
    with Curriculum.open(path) as curriculum:
        assert len(curriculum) == 2
    assert path.read_bytes() == whole


def test_a_file_that_another_process_changed_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.rod"
    write(path, 2)
    with Curriculum.open(path) as one, Curriculum.open(path) as two:
        extend(two, 3)
        with pytest.raises(ValueError, match="another one writes to it: run one job per folder"):
            extend(one, 3)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: check the path"),
        (b"Good morning, no log.", r"begins with b'Good mor', expected b'RODCUR01'"),
        (b"", "begins with b''"),
    ],
)
def test_files_that_are_no_curriculum(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "c.rod"
    if content is not None:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="exists: open it to resume, or remove it"):
            Curriculum.create(path, HEADER)
        assert path.read_bytes() == content
    with pytest.raises(ValueError, match=sentence):
        Curriculum.open(path)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.rod"
    whole = write(tmp_path / "three", 3)
    write(path, 2)
    room = len(whole) + SIZE // 2  # for half a record more
    with Curriculum.open(path) as curriculum:
        with pytest.raises(OSError, match="make room"), largest_file(room):
            extend(curriculum, 9)
        assert len(curriculum) == 3
        assert path.read_bytes() == whole
