"""Datasets on the Hugging Face Hub, or in its layout: streamed and resumable."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.adapters.hub_files import is_commit
from nemo_rod.corpus.formats import Content, Extract, Input, ReadError, Unpacked
from nemo_rod.corpus.input_files import HEAD, folder_files, pick_evenly, refuse_placeholder
from nemo_rod.corpus.sources import SourceSpec, takes
from nemo_rod.files import interpreting, read_json

_BULKY = {".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv"}  # forms of data alone


@takes("path", "subset", "split", "revision", "text_field", "filter", "max_bytes")
def read_dataset(spec: SourceSpec) -> list[Input]:
    """Returns the Hugging Face dataset of a source, as one input."""
    return [HuggingFaceDataset(spec)]


class HuggingFaceDataset(Input):
    """The Hugging Face dataset of a source, streamed."""

    cure = f"{Input.cure}, or read files whose columns differ with kind: jsonl or parquet"

    def __init__(self, spec: SourceSpec) -> None:
        path = os.path.expanduser(str(spec.path))
        is_local = Path(path).is_dir()
        label = Path(path).name if is_local else path
        name = f"{label}[{spec.subset or 'default'},{spec.split}]@{spec.revision or 'main'}"
        super().__init__(name, None, path)
        files = folder_files(Path(path)) if is_local else []
        for file in [path, *(name for name, _ in files)] if is_local else ():
            if glob.has_magic(file):
                raise ValueError(
                    f"datasets takes the name {file!r} in {path} for a pattern, and would read "
                    "other files: rename it"
                )
        saved = _saved_files(os.path.join(path, name) for name, _ in files)
        for folder, shards in saved.items():
            for shard in shards:
                if not (folder / shard).is_file():
                    raise ValueError(
                        f"{folder / shard} is missing, of the files in state.json: copy it again"
                    )
        self.parts = [file for file in files if _is_data(os.path.join(path, file[0]), saved)]
        for part in (name for name, _ in self.parts if _format(name)):  # others are not read
            with Path(path, part).open("rb") as head:
                refuse_placeholder(Path(path, part), head.read(HEAD))
        self._spec, self._extract = spec, Extract(spec)
        self._dataset: Any = None
        self._start: Any = None  # where this reading began
        self._position: Any = None  # the last one that was asked for, and its number of rows
        self._done_before = 0
        self._files: list[str] = []

    def commit(self) -> str | None:
        """Returns the commit that the revision is at now; None if unknown."""
        from huggingface_hub import HfApi

        if Path(self.place).exists():
            return None
        revision = self._spec.revision
        if is_commit(revision):
            return revision
        try:
            commit: str | None = HfApi().dataset_info(self.place, revision=revision, timeout=60).sha
        except Exception:  # no network, or a mirror: reading fails later if it matters
            return None
        return commit

    def records(self, position: Any) -> Iterator[Content | None]:
        """Yields the text of every row."""
        self._start, self._done, self._done_before = position, 0, 0
        self._dataset = self._open()
        if position is not None:
            self._dataset.load_state_dict(position)
        self._position = self._dataset.state_dict()
        for record in self._dataset:
            self._done += 1
            if self._done == 1:
                self.position()  # fails early if the stream cannot be resumed
            place = "a row" if position is not None else f"row {self._done}"
            yield self._extract(record, f"{self.place}, {place}")

    def _open(self) -> Any:
        from datasets import load_dataset_builder
        from datasets.data_files import DataFilesDict, DataFilesList

        spec = self._spec
        try:
            _refuse_damage()
            builder = load_dataset_builder(self.place, name=spec.subset, revision=spec.revision)
            if builder.name == "text":
                builder.config.encoding, builder.config.sample_by = "utf-8-sig", "document"
            all_files = builder.config.data_files or {}
            read = {_format(str(file)) for files in all_files.values() for file in files}
            # the library reads only the most frequent of several forms
            for name, _ in self.parts if read and spec.subset is None else ():
                if _format(name).lower() in _BULKY and _format(name) not in read:
                    raise ValueError(
                        f"{name} is not read, as {', '.join(sorted(read))} files are: move it out"
                    )
            names = sorted(all_files) if spec.split == "all" else [spec.split]
            unique: dict[str, str] = {}  # resolved path -> file: each is read once
            for file in [file for name in names for file in all_files.get(name, ())]:
                unique.setdefault(file if "://" in file else os.path.realpath(file), file)
            # a dataset's own README may name any file of this machine
            root = os.path.join(os.path.abspath(self.place), "")
            for file in unique.values():
                inside = os.path.isdir(root) and os.path.abspath(file).startswith(root)
                if not inside and ("://" not in file or "file:" in file):
                    raise ValueError(f"it names {file}, which is not of it: remove that name")
            saved = _saved_files(unique.values())
            data = [file for file in unique.values() if _is_data(file, saved)]
            self._extract.files = self._files = pick_evenly(data, spec.max_files)
            if self._files and self._files != list(all_files.get(spec.split, ())):
                # their origins are part of the key of a cache, which streaming does not use
                files = DataFilesList(self._files, [("",)] * len(self._files))
                builder.config.data_files = DataFilesDict({spec.split: files})
            return builder.as_streaming_dataset(spec.split)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            first = "".join(f", or the file read first, {file}" for file in self._files[:1])
            raise ValueError(
                f"dataset {self.name} cannot be opened ({reason}): check path, subset, split and "
                f"revision of the source, whose path is {self.place}{first}"
            ) from error

    def where(self) -> str:
        """Returns the dataset and its current file, if the library's state has it."""
        state = None if self._dataset is None else self._dataset.state_dict()
        while isinstance(state, dict) and "shard_idx" not in state:
            state = state.get("examples_iterable")
        first = state["shard_idx"] if isinstance(state, dict) else len(self._files)
        return ", in ".join([self.place, *self._files[first : first + 1]])

    def position(self) -> Any:
        """Returns the state of the dataset.

        Raises:
            ValueError: rows were read, but the state is the same: that of datasets 5.0.0 would make
                a resumed run begin again.
        """
        if self._dataset is None:
            return self._start
        state = self._dataset.state_dict()
        if state == self._position and self._done > self._done_before:
            import datasets

            # Later on, the positions before may have been wrong, too: then no work is kept.
            raise (ReadError if self._done == 1 else ValueError)(
                f"source {self._spec.name}: {self.place}: datasets {datasets.__version__} does not "
                "say where it reads, so that an interrupted run would read rows twice: install "
                "another version, such as 5.0.1, and run prepare again"
            )
        self._position, self._done_before = state, self._done
        return state


def _refuse_damage() -> None:
    """Lets `datasets` read compressed files by `Unpacked`: its own way, half of a .zst is whole."""
    from datasets.filesystems import COMPRESSION_FILESYSTEMS
    from fsspec.compression import register_compression

    for system in COMPRESSION_FILESYSTEMS:
        if suffix := {"bz2": ".bz2", "xz": ".xz", "zstd": ".zst"}.get(system.protocol):

            def open_unpacked(handle: Any, suffix: str = suffix, **_: Any) -> io.BufferedReader:
                return io.BufferedReader(Unpacked(handle, suffix), 1 << 20)

            system.compression = f"whole {suffix}"
            register_compression(system.compression, open_unpacked, [], force=True)


def _saved_files(files: Iterable[str]) -> dict[Path, list[str]]:
    """Returns the names of the files of the datasets that were saved in the files' folders."""
    saved: dict[Path, list[str]] = {}
    for folder in sorted({Path(file).parent for file in files}):
        if (state := folder / "state.json").is_file():
            with interpreting(state, cure="copy it again"):
                if (listed := read_json(state).get("_data_files")) is not None:
                    saved[folder] = [str(file["filename"]) for file in listed]
    return saved


def _is_data(file: str, saved: dict[Path, list[str]]) -> bool:
    """Returns whether a file is more than a cache, or a former shard, beside a saved dataset's."""
    shards = saved.get(Path(file).parent)
    return shards is None or not file.endswith(".arrow") or Path(file).name in shards


def _format(name: str) -> str:
    """Returns the suffix of a file, without that of a compressed one."""
    suffixes = [suffix for suffix in Path(name).suffixes if suffix not in (".gz", ".xz", ".zst")]
    return suffixes[-1] if suffixes else ""
