"""What is kept of the base's predictions: written by many, read back whole, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_rod.selection import ReferenceManifest, References, ReferenceWriter, compact
from nemo_rod.selection.references import teacher as teacher_module
from nemo_rod.selection.references.folder import LOSS_DEFINITION, role_manifest
from nemo_rod.selection.references.teacher import (
    FILE,
    Teacher,
    TeacherWriter,
    distilled_loss,
    make_room,
    open_teacher,
    record_type,
    teacher_top_k,
)

SIZE, TOP_K, VOCABULARY = 16, 3, 300


class Store:
    """Ten new blocks, then six of replay."""

    block_size, tokenizer_fingerprint, digest = SIZE, "tokens", "store"
    num_adaptation, vocab_size = 10, VOCABULARY

    def __init__(self, seed: int = 0) -> None:
        self.all_hashes = np.random.default_rng(seed).integers(0, 256, (16, 16), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.all_hashes)

    def hashes(self, block_ids: np.ndarray) -> np.ndarray:
        return self.all_hashes[block_ids]


def manifest(top_k: int = TOP_K, role: str = "replay") -> ReferenceManifest:
    loss = distilled_loss(top_k) if role == "replay" else LOSS_DEFINITION
    return role_manifest(Store(), role, model="m", precision="fp32", loss=loss)


def kept(block_ids: np.ndarray, top_k: int = TOP_K) -> tuple[np.ndarray, np.ndarray]:
    """Something else for every block."""
    ids = np.arange(SIZE * top_k).reshape(SIZE, top_k) + block_ids[:, None, None]
    logprobs = -np.arange(SIZE * (top_k + 1)).reshape(SIZE, -1) - block_ids[:, None, None] / 4
    return ids, logprobs.astype(np.float16)


def write(folder: Path, block_ids: list[int]) -> None:
    make_room(folder, manifest(), VOCABULARY)
    writer = TeacherWriter(folder, manifest(), VOCABULARY)
    ids = np.array(block_ids)
    writer.write(ids, *kept(ids), Store().hashes(ids))
    writer.close()


def log(folder: Path, found: ReferenceManifest) -> None:
    ids = np.arange(found.start, found.stop)
    with ReferenceWriter(folder, 0, manifest=found) as writer:
        writer.append(ids, np.ones((len(ids), 8)), Store().hashes(ids))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Complete references with their records, written by two in turn."""
    path = tmp_path / "base_distillation"
    path.mkdir()
    write(path, [15, 10, 12])
    write(path, [11, 14, 13])
    log(path, manifest())
    compact(path, manifest=manifest(), hashes=Store().hashes)
    return path


def opened(folder: Path, store: Store | None = None) -> Teacher:
    teacher = open_teacher([folder], store or Store())
    assert teacher is not None
    return teacher


def test_records_are_read_back_in_any_order(folder: Path) -> None:
    wanted = np.array([14, 10, 14, 15])
    teacher = opened(folder)
    ids, logprobs = teacher[wanted]
    assert teacher.top_k == TOP_K and ids.dtype == np.int32 and logprobs.dtype == np.float16
    assert (ids == kept(wanted)[0]).all() and (logprobs == kept(wanted)[1]).all()
    assert teacher.covers(np.array([9, 10, 15, 16])).tolist() == [False, True, True, False]


def test_a_record_takes_what_the_docs_say() -> None:
    assert record_type(4096, 16, 131_072).itemsize == 4096 * (16 * 6 + 2) + 12
    assert record_type(4096, 16, 256).itemsize == 4096 * (16 * 4 + 2) + 12


def test_the_definition_of_the_loss_names_what_is_kept() -> None:
    assert teacher_top_k(distilled_loss(16)) == 16
    assert teacher_top_k(LOSS_DEFINITION) is None


def test_a_damaged_record_is_refused_and_the_others_are_not(folder: Path) -> None:
    damage = np.load(folder / FILE, mmap_mode="r+")
    damage["logprobs"][2, 5, 1] += 1
    damage.flush()
    opened(folder)[np.array([10, 11, 13])]
    with pytest.raises(ValueError, match=r"of block 12 in .* is damaged \(checksum\): restore"):
        opened(folder)[np.array([10, 12])]


def test_a_store_of_other_content_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"of block 10 in .* is of other content than the block"):
        opened(folder, Store(seed=1))[np.array([10])]


def test_a_file_cut_off_is_refused(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"teacher\.npy cannot be read"):
        opened(folder)


def test_going_on_with_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    make_room(tmp_path, manifest(), VOCABULARY)
    with pytest.raises(ValueError, match=r"or of another scoring\.teacher_top_k than 4: remove"):
        make_room(tmp_path, manifest(4), VOCABULARY)


def test_logs_whose_records_are_gone_are_refused(tmp_path: Path) -> None:
    log(tmp_path, manifest())
    with pytest.raises(ValueError, match=r"teacher\.npy is missing, but .* has logs of blocks"):
        make_room(tmp_path, manifest(), VOCABULARY)


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    large = replace(manifest(), stop=1 << 50)
    with pytest.raises(ValueError, match=r"needs .* GB more, and .* GB are free: make room, or"):
        make_room(tmp_path, large, VOCABULARY)


def test_making_room_again_keeps_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, [12, 13])
    before = (tmp_path / FILE).read_bytes()
    make_room(tmp_path, manifest(), VOCABULARY)
    assert (tmp_path / FILE).read_bytes() == before


def test_only_jobs_that_can_score_against_them_open_them(folder: Path, tmp_path: Path) -> None:
    specialist = tmp_path / "specialist"
    new = manifest(role="adaptation")
    log(specialist, new)
    compact(specialist, manifest=new, hashes=Store().hashes)
    folders = [specialist, folder]
    references = References.open(folders, Store(), distilled=True)
    assert references[np.array([0, 15])].shape == (2,)
    with pytest.raises(ValueError, match="base_distillation is of the self-distillation score, wh"):
        References.open(folders, Store())
    assert open_teacher([specialist], Store()) is None
    with pytest.raises(ValueError, match=r"both have a teacher\.npy: name one of the two"):
        open_teacher([folder, specialist / ".." / folder.name], Store())


def test_a_write_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    make_room(tmp_path, manifest(), VOCABULARY)
    monkeypatch.setattr(teacher_module.os, "pwrite", full)
    with pytest.raises(OSError, match="make room and run it again") as error:
        write(tmp_path, [10])
    assert str(tmp_path / FILE) in str(error.value)
