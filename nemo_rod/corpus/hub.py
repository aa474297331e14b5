"""Datasets on the Hugging Face Hub, or in its layout: streamed and resumable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.formats import Extract, Input, spread
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.trust import is_commit

ALL_SPLITS = "all"


def read_dataset(spec: SourceSpec) -> list[Input]:
    """Returns the Hugging Face dataset of a source, as one input."""
    return [HuggingFaceDataset(spec)]


class HuggingFaceDataset(Input):
    """The Hugging Face dataset of a source, streamed."""

    def __init__(self, spec: SourceSpec) -> None:
        path = str(spec.path)
        label = Path(path).name if Path(path).is_dir() else path
        name = f"{label}[{spec.subset or 'default'},{spec.split}]@{spec.revision or 'main'}"
        super().__init__(name, None)
        self._spec, self._extract = spec, Extract(spec)
        self._dataset: Any = None
        self._start: Any = None

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every row."""
        self._start = position
        self._dataset = self._open()
        if position is not None:
            self._dataset.load_state_dict(position)
        for number, record in enumerate(self._dataset):
            place = "a row" if position is not None else f"row {number + 1}"
            yield self._extract(record, f"{self._spec.path}, {place}")

    def _open(self) -> Any:
        from datasets import load_dataset_builder
        from datasets.data_files import DataFilesDict, DataFilesList

        spec = self._spec
        try:
            builder = load_dataset_builder(spec.path, name=spec.subset, revision=spec.revision)
            if spec.split != ALL_SPLITS and spec.max_files is None:
                return builder.as_streaming_dataset(spec.split)
            all_files = builder.config.data_files
            names = sorted(all_files) if spec.split == ALL_SPLITS else [spec.split]
            pairs: list[tuple[Any, Any]] = []
            for name in names:
                pairs += zip(all_files[name], all_files[name].origin_metadata, strict=True)
            chosen = spread(pairs, spec.max_files)
            files = DataFilesList([file for file, _ in chosen], [origin for _, origin in chosen])
            builder.config.data_files = DataFilesDict({spec.split: files})
            return builder.as_streaming_dataset(spec.split)
        except Exception as error:  # the library passes on any error of its many loaders
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"dataset {self.name} cannot be opened ({reason}): "
                "check path, subset, split and revision of the source"
            ) from error

    def position(self) -> Any:
        """Returns the state of the dataset."""
        return self._start if self._dataset is None else self._dataset.state_dict()


def commit_on_hub(path: str, revision: str | None) -> str | None:
    """Returns the commit that a revision of a dataset is at now; None if unknown."""
    from huggingface_hub import HfApi

    if Path(path).exists():
        return None
    if is_commit(revision):
        return revision
    try:
        commit: str | None = HfApi().dataset_info(path, revision=revision, timeout=60).sha
    except Exception:  # no network, or a mirror: reading fails later if it matters
        return None
    return commit
