"""A reader: CSV files with a header; every row is a document."""

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nemo_rod.corpus.formats import MAX_DOCUMENT_BYTES, Content, Extract, Input
from nemo_rod.corpus.input_files import matching_files
from nemo_rod.corpus.sources import SourceSpec, takes

csv.field_size_limit(MAX_DOCUMENT_BYTES)  # 131,072 by default


class CsvFile(Input):
    def __init__(self, path: Path, name: str, spec: SourceSpec) -> None:
        super().__init__(name, path.stat().st_size)
        self.path, self.delimiter = path, spec.options.get("delimiter", ",")
        self.extract = Extract(spec)  # applies text_field and filter

    def read(self, start: int) -> Iterator[Content | None]:
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = enumerate(csv.DictReader(file, delimiter=self.delimiter), start=1)
            for number, row in islice(rows, start, None):
                yield self.extract(row, f"{self.path}, row {number}")


@takes("files", "text_field", "filter", "max_bytes", "options")
def read_csv(spec: SourceSpec) -> list[Input]:
    return [CsvFile(path, name, spec) for path, name in matching_files(spec)]
