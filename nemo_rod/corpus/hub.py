"""Datasets on the Hugging Face Hub, or in its layout: streamed and resumable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.formats import Extract, spread

ALL_SPLITS = "all"


class HuggingFaceDataset:
    """A Hugging Face dataset, streamed.

    Args:
        path: Name on the Hub, or a folder.
        subset: Configuration of the dataset.
        split: Split of the dataset; ``all`` for every split of the configuration, by name.
        revision: Commit, branch or tag; a commit makes the corpus reproducible.
        max_files: Maximum number of files to read, evenly spaced; None for all.
        extract: Extracts the text of a record.
    """

    def __init__(
        self,
        *,
        path: str,
        subset: str | None,
        split: str,
        revision: str | None,
        max_files: int | None,
        extract: Extract,
    ) -> None:
        label = Path(path).name if Path(path).is_dir() else path
        self.name = f"{label}[{subset or 'default'},{split}]@{revision or 'main'}"
        self.size: int | None = None
        self._arguments = {"path": path, "name": subset, "revision": revision}
        self._split, self._max_files = split, max_files
        self._extract = extract
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
            yield self._extract(record, f"{self._arguments['path']}, {place}")

    def _open(self) -> Any:
        from datasets import load_dataset_builder

        try:
            builder = load_dataset_builder(**self._arguments)
            split = self._split
            if split == ALL_SPLITS or self._max_files is not None:
                split = _choose_files(builder, split, self._max_files)
            return builder.as_streaming_dataset(split)
        except Exception as error:  # the library passes on any error of its many loaders
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"dataset {self.name} cannot be opened ({reason}): "
                "check path, subset, split and revision of the source"
            ) from error

    def position(self) -> Any:
        """State of the dataset."""
        return self._start if self._dataset is None else self._dataset.state_dict()

    def consumed(self) -> int:
        """Always 0: unknown."""
        return 0


def _choose_files(builder: Any, split: str, max_files: int | None) -> str:
    """Restricts a dataset to the chosen files and returns their split."""
    from datasets.data_files import DataFilesDict, DataFilesList

    found = builder.config.data_files
    names = sorted(found) if split == ALL_SPLITS else [split]
    pairs: list[tuple[Any, Any]] = []
    for name in names:
        pairs += zip(found[name], found[name].origin_metadata, strict=True)
    chosen = spread(pairs, max_files)
    files = DataFilesList([file for file, _ in chosen], [origin for _, origin in chosen])
    builder.config.data_files = DataFilesDict({split: files})
    return split
