"""Parquet files, read by pyarrow a few rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rod.corpus.formats import (
    LONG_BYTES,
    Content,
    InputFile,
    file_reader,
    long_text,
    missing_field,
)
from nemo_rod.corpus.input_files import HEAD, refuse_placeholder


class ParquetTable(InputFile):
    """A parquet file with a text column."""

    _rows = 0  # rows of the whole file, known once it is open

    def read(self, start: int) -> Iterator[Content | None]:
        """Yields the text of every row; skips whole row groups before the start."""
        import pyarrow
        import pyarrow.parquet

        try:
            with self.path.open("rb") as head:
                refuse_placeholder(self.path, head.read(HEAD))
            source = self.path if isinstance(self.path, Path) else self.path.open("rb")
            usual = pyarrow.default_memory_pool()
            # gives the memory of long rows back as soon as they are freed
            pyarrow.set_memory_pool(pyarrow.system_memory_pool())
            try:
                file = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
            finally:
                pyarrow.set_memory_pool(usual)
            with file:
                self._rows = file.metadata.num_rows
                names = file.schema_arrow.names
                columns = set()
                for field in self._extract.fields:
                    column = field if field in names else field.split(".")[0]
                    if column not in names:
                        raise ValueError(missing_field(self.place, field, names, [self.place], ""))
                    if names.count(column) > 1:
                        raise ValueError(
                            f"{self.path}: {names.count(column)} columns are named {column!r}: "
                            "remove or rename all but one of them"
                        )
                    columns.add(column)
                groups = range(file.metadata.num_row_groups)
                facts = [file.metadata.row_group(group) for group in groups]
                sizes = [group.num_rows for group in facts]
                first = sum(end <= start for end in itertools.accumulate(sizes))
                number = sum(sizes[:first])
                # Few rows at a time: a dictionary of kilobytes can unpack to gigabytes.
                longest = max((g.total_byte_size // max(1, g.num_rows) for g in facts), default=0)
                size = max(1, min(16, LONG_BYTES // max(1, longest)))
                for batch in file.iter_batches(size, [*groups[first:]], sorted(columns)):
                    skipped = min(max(0, start - number), batch.num_rows)
                    for row, record in enumerate(self._records(batch.slice(skipped)), skipped):
                        yield self._extract(record, f"{self.path}, row {number + row + 1}")
                        del record  # frees memory while the next record is made
                    number += batch.num_rows
                    del batch
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            cure = "leave it out" if Path(self.place).name.startswith("_") else "fetch it again"
            raise ValueError(
                f"{self.path}: not a readable parquet file ({error}): {cure}"
            ) from error

    def _records(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yields the rows of a batch, with a long text as `LongText`."""
        name = self._extract.text_field
        place = batch.schema.get_field_index(name)
        if batch.nbytes < LONG_BYTES or place < 0 or str(batch.schema.types[place]) != "string":
            yield from batch.to_pylist()
            return
        batch = batch.set_column(place, name, batch.column(place).cast("large_binary"))
        for row in range(batch.num_rows):
            (record,) = batch.slice(row, 1).to_pylist()
            yield {**record, name: None if record[name] is None else long_text(record[name])}

    def bytes_read(self) -> int:
        """Returns the number of bytes read, estimated from the share of rows."""
        return (self.size or 0) * self._done // self._rows if self._rows else 0


read_parquet = file_reader(ParquetTable, "text_field", "filter")
