"""A reader: CSV files with a header; every row is a document."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.documents import matching_files
from nemo_rod.corpus.formats import MAX_DOCUMENT_BYTES, Extract, Input
from nemo_rod.corpus.sources import SourceSpec

csv.field_size_limit(MAX_DOCUMENT_BYTES)  # 131,072 by default


class CsvFile(Input):
    def __init__(self, path: Path, name: str, spec: SourceSpec) -> None:
        super().__init__(name, path.stat().st_size)
        self.path, self.delimiter = path, spec.options.get("delimiter", ",")
        self.extract = Extract(spec)  # applies text_field and filter

    def records(self, position: Any) -> Iterator[str | None]:
        start = self._done = position or 0
        with self.path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file, delimiter=self.delimiter)):
                if number >= start:
                    self._done = number + 1
                    yield self.extract(row, f"{self.path}, row {number + 1}")


def read_csv(spec: SourceSpec) -> list[Input]:
    return [CsvFile(path, name, spec) for path, name in matching_files(spec)]
