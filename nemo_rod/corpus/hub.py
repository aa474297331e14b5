"""Datasets of the Hugging Face hub, or in its layout: streamed, and read on from the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.formats import Extract, spread

ALL_SPLITS = "all"


class HuggingFaceDataset:
    """A Hugging Face dataset, streamed.

    Args:
        path: Name on the hub, or a folder.
        subset: Its configuration.
        split: Its split; ``all`` for every split of the configuration, by name.
        revision: Commit, branch or tag; a commit makes the corpus reproducible.
        max_files: Read only as many of its files, evenly spread; None for all.
        extract: Takes the text out.
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
        """Text of every row."""
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
        except Exception as error:  # the library raises whatever its many loaders raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"dataset {self.name} cannot be opened ({reason}): "
                "check path, subset, split and revision of the source"
            ) from error

    def position(self) -> Any:
        """The dataset's own state."""
        return self._start if self._dataset is None else self._dataset.state_dict()

    def consumed(self) -> int:
        """Unknown."""
        return 0


def _choose_files(builder: Any, split: str, max_files: int | None) -> str:
    """Makes the files that are wanted the only ones of a dataset, and returns their split."""
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
