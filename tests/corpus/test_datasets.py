"""Hugging Face datasets: streamed by the library, resumed exactly, and its errors in a sentence."""

import bz2
import errno
import gzip
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_cases import interrupted, read_documents, refuse, run, tree, web, write_parquet

from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.adapters.hub_datasets import HuggingFaceDataset
from nemo_rod.corpus.formats import ReadError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 200)


def hub(path: Path, **fields: Any) -> SourceSpec:
    return web(kind="huggingface", path=str(path), **fields)


def rows(file: int, count: int = 40) -> list[str]:
    letters = np.random.default_rng(file).integers(97, 123, (count, 30), dtype=np.uint8)
    return [f"{file} {row} {text.tobytes().decode()}" for row, text in enumerate(letters)]


def made(folder: Path, files: int = 3, *, is_saved: bool = False) -> Path:
    folder.mkdir()
    tables = [{"text": rows(number)} for number in range(files)]
    if is_saved:
        whole = {"text": [text for table in tables for text in table["text"]]}
        datasets.Dataset.from_dict(whole).save_to_disk(folder, num_shards=files)
    for number, table in enumerate(tables if not is_saved else ()):
        write_parquet(folder / f"train-{number}.parquet", table)
    return folder


class Standing:
    """A dataset whose position stands still from a row on, as that of datasets 5.0.0."""

    def __init__(self, inner: Any, stop: int) -> None:
        self.inner, self.stop, self.read = inner, stop, 0
        self.state: Any = {"start": None}

    def __iter__(self) -> Iterator[Any]:
        for row in self.inner:
            self.read += 1
            if self.read <= self.stop:
                self.state = self.inner.state_dict()
            yield row

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("stop", [0, 20])
def test_a_position_that_does_not_move_is_noticed(tmp_path, monkeypatch, stop):
    source, whole = hub(made(tmp_path / "data")), HuggingFaceDataset._open
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceDataset, "_open", lambda self: Standing(whole(self), stop))
        with pytest.raises(
            ValueError, match=r"^source web: .*data: datasets \S+ does not say where"
        ):
            run(tmp_path / "blocks", [source], checkpoint_seconds=0)
    run(tmp_path / "blocks", [source])
    run(tmp_path / "fresh", [source])
    assert tree(tmp_path / "blocks") == tree(tmp_path / "fresh")


def test_a_grown_folder_is_another_source(tmp_path):
    source = hub(made(tmp_path / "data", files=2))
    interrupted(tmp_path / "blocks", [source], 1)
    write_parquet(tmp_path / "data" / "train-00.parquet", {"text": rows(7)})
    run(tmp_path / "blocks", [source])
    run(tmp_path / "fresh", [source])
    assert tree(tmp_path / "blocks") == tree(tmp_path / "fresh")
    write_parquet(tmp_path / "data" / "train-9.parquet", {"text": rows(9)})
    with pytest.raises(ValueError, match=r"dataset_files was .* and is now .*train-9\.parquet"):
        run(tmp_path / "blocks", [source])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "ArrowInvalid: "),
        (lambda path: write_parquet(path, {"text": [{"a": 1}] * 9}), "TypeError: Couldn't cast"),
        (lambda path: write_parquet(path, {"text": ["a"], "id": [1]}), "differ with kind: jsonl"),
        (lambda path: path.write_bytes(b""), "train-2.parquet"),
    ],
)
def test_what_the_library_raises_names_the_file_and_loses_no_block(tmp_path, damage, sentence):
    data = made(tmp_path / "data")
    damage(data / "train-2.parquet")
    with pytest.raises(ReadError) as error:
        run(tmp_path / "blocks", [hub(data)], checkpoint_seconds=1e9)
    message = str(error.value)
    assert message.startswith(f"source web: {data}, in {data}/train-2.parquet, after 80 rec")
    assert sentence in message and "\n" not in message
    kept = tmp_path / "blocks/.partial/replay-web"
    assert (kept / "state.json").exists() and (kept / "out/hash.npy").stat().st_size > 16 * 30


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("form", ["txt", "csv", "jsonl"])
def test_half_a_compressed_file_is_not_whole(tmp_path, form, suffix):
    zstandard = pytest.importorskip("zstandard")
    packers = {".gz": gzip, ".bz2": bz2, ".xz": lzma, ".zst": zstandard}
    texts = rows(0, 2000)
    lines = {"txt": texts, "csv": ["text", *texts]}.get(form) or [
        f'{{"text":"{t}"}}' for t in texts
    ]
    first, second = (
        packers[suffix].compress("".join(f"{line}\n" for line in part).encode())
        for part in (lines[:10], lines[10:])
    )
    file = tmp_path / f"a.{form}{suffix}"
    file.write_bytes(first + second)
    expected = ["".join(f"{text}\n" for text in texts)] if form == "txt" else texts
    assert list(read_documents(hub(tmp_path))) == expected
    for damaged in (second[: len(second) // 2], second[:8], bytes([second[0] ^ 1]) + second[1:]):
        file.write_bytes(first + damaged)
        refuse(hub(tmp_path), str(file))


def test_a_network_error_is_a_sentence_and_a_full_disk_passes(tmp_path, monkeypatch):
    class Flaky(Standing):
        def __iter__(self) -> Iterator[Any]:
            for number, row in enumerate(super().__iter__()):
                if number == 50:
                    raise error
                yield row

    source, whole = hub(made(tmp_path / "data")), HuggingFaceDataset._open
    monkeypatch.setattr(HuggingFaceDataset, "_open", lambda self: Flaky(whole(self), 999))
    error: OSError = ConnectionError("peer closed connection")
    sentence = r"after 50 records .*: ConnectionError: peer closed .*: repair"
    with pytest.raises(ReadError, match=sentence):
        list(read_documents(source))
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        list(read_documents(source))


def test_a_file_of_a_folder_is_read_once_or_refused(tmp_path, monkeypatch):
    data = made(tmp_path / "data", files=2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(read_documents(hub(Path("~/data")))) == rows(0) + rows(1)
    (data / "latest").symlink_to(".")
    (data / "train-2.parquet").symlink_to("train-0.parquet")
    (data / "train-3.parquet").symlink_to("../data/train-2.parquet")
    assert list(read_documents(hub(data))) == rows(0) + rows(1)
    assert list(read_documents(hub(data, split="all", max_files=1))) == rows(0)
    (data / "train-4.parquet").symlink_to("gone")
    refuse(hub(data), "source web: ", "train-4.parquet is a link to 'gone'")


def test_only_the_shards_of_a_saved_dataset_are_read(tmp_path):
    data = made(tmp_path / "data", files=2, is_saved=True)
    shards = sorted(data.glob("*.arrow"))
    run(tmp_path / "blocks", [hub(data)])
    shutil.copy(shards[0], data / "cache-0123456789abcdef.arrow")  # as Dataset.map leaves
    run(tmp_path / "blocks", [hub(data)])
    assert list(read_documents(hub(data))) == rows(0) + rows(1)
    datasets.Dataset.from_dict({"text": rows(2)}).save_to_disk(data)  # into the same folder
    assert shards[0].exists() and list(read_documents(hub(data))) == rows(2)
    (data / "data-00000-of-00001.arrow").unlink()
    refuse(hub(data), "data-00000-of-00001.arrow is missing, of the files in state.json: copy it")


@pytest.mark.parametrize("name", ["train[1].parquet", "v[1]/a.parquet", "v[1]", "what?", "a*"])
def test_names_that_the_library_takes_for_patterns_are_refused(tmp_path, name):
    data = made(tmp_path / ("data" if "." in name else name))
    if "." in name:
        (data / name).parent.mkdir(exist_ok=True)
        write_parquet(data / name, {"text": rows(9)})
    refuse(hub(data), "source web: datasets takes the name ", ": rename it")


def test_files_of_another_form_are_not_left_out_without_a_word(tmp_path):
    folder = made(tmp_path / "data")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "SHA256SUMS").write_text("d41d8cd98f00b204e9800998ecf8427e  train-0.parquet\n")
    assert len(list(read_documents(hub(folder)))) == 120
    (folder / "train-0.parquet.md5").write_text("d41d8cd98f00b204e9800998ecf8427e\n")
    refuse(hub(folder), ".md5 is not the data, but a digest of it: fetch the file, or leave it out")
    (folder / "train-0.parquet.md5").unlink()
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    refuse(hub(folder), "more.jsonl.gz is not read, as .parquet files are")
    (folder / "more.jsonl.gz").rename(folder / "MORE.PARQUET")
    refuse(hub(folder), "MORE.PARQUET is not read, as .parquet files are")


def test_a_file_of_text_is_a_document_without_its_byte_order_mark(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + f"{name} 1\n\n{name} 2\n".encode())
    assert list(read_documents(hub(tmp_path))) == ["a 1\n\na 2\n", "b 1\n\nb 2\n"]


def test_values_that_python_cannot_hold_are_named(tmp_path):
    import pyarrow

    late = pyarrow.array([2**48], pyarrow.timestamp("ms"))  # in the year 10889
    file = write_parquet(tmp_path / "a.parquet", {"text": ["a"], "date": late})
    assert list(read_documents(web(file, kind="parquet"))) == ["a"]
    sentence = f"source web: {file}, after 0 records of this run: Overflow"
    refuse(web(file, kind="parquet", filter="date != null"), sentence)
