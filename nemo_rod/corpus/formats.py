"""One class per input format: each yields the texts of one file and can start in its middle.

An input yields one item per record: the record's text, or None if the filter drops it. With its
`position`, which is plain JSON, `records` resumes after the last record it yielded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nemo_rod.corpus.filters import Comparison, lookup
from nemo_rod.corpus.unpack import Counter, read_whole, split_lines

T = TypeVar("T")

MAX_DOCUMENT_BYTES = 128 << 20
MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES  # JSON may escape characters, and has other fields


class Input(Protocol):
    """A file, or an equivalent, that texts are read from.

    Attributes:
        name: Name in the manifest, independent of local paths.
        size: Size in bytes; None if unknown.
    """

    name: str
    size: int | None

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every record from `position` on (None: from the beginning)."""
        ...

    def position(self) -> Any:
        """Position from which to resume after the last record."""
        ...

    def consumed(self) -> int:
        """Number of bytes of the file read so far."""
        ...


class Extract:
    """Extracts the text of a record if it passes the filter.

    Args:
        text_field: Field with the text.
        comparisons: Comparisons that must all hold.
    """

    def __init__(self, text_field: str, comparisons: Sequence[Comparison]) -> None:
        self.text_field = text_field
        self.comparisons = tuple(comparisons)

    @property
    def fields(self) -> list[str]:
        """All fields in use."""
        return [self.text_field, *(comparison.field for comparison in self.comparisons)]

    def __call__(self, record: Any, where: str) -> str | None:
        """Returns the record's text, or None if the filter drops it.

        Args:
            record: Mapping from field to value.
            where: File and line, for error messages.
        """
        if not isinstance(record, Mapping):
            raise ValueError(f"{where}: expected an object with fields, found {record!r:.60}")
        try:
            for comparison in self.comparisons:
                if not comparison.holds(lookup(record, comparison.field)):
                    return None
            text = lookup(record, self.text_field)
        except KeyError as error:
            raise ValueError(missing_field(where, error.args[0], record)) from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: field {self.text_field!r} must be text, found {text!r:.60}: "
                f"name another text_field, or drop such records with filter: {self.text_field} "
                "!= null"
            )
        return text


def missing_field(where: str, field: str, fields: Iterable[str]) -> str:
    """Returns the error message for a missing field."""
    found = ", ".join(sorted(str(name) for name in fields)) or "none"
    return f"{where}: no field {field!r} (found: {found}): set text_field or filter to one of those"


class TextFile:
    """A plain file (also .gz, .zst) that is one document."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.size: int | None = path.stat().st_size
        self._read = False

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the file's text, once."""
        self._read = bool(position)
        if not self._read:
            data = read_whole(self.path, limit=MAX_DOCUMENT_BYTES)
            self._read = True
            try:
                yield data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.path}: byte {error.start} is not UTF-8: convert the file"
                ) from None

    def position(self) -> Any:
        """1 if the file has been read, else 0."""
        return int(self._read)

    def consumed(self) -> int:
        """Size of the file once it has been read, else 0."""
        return (self.size or 0) if self._read else 0


class JsonLines:
    """A JSON Lines file (plain, .gz or .zst) with one object with a text field per line."""

    def __init__(self, path: Path, name: str, extract: Extract) -> None:
        self.path, self.name, self._extract = path, name, extract
        self.size: int | None = path.stat().st_size
        self._line = 0
        self._counter = Counter()

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every line; blank lines count as filtered."""
        start = self._line = int(position or 0)
        lines = split_lines(self.path, self._counter, limit=MAX_LINE_BYTES)
        for number, line in enumerate(lines):
            if number < start:
                continue
            self._line = number + 1
            if not line.strip():
                yield None
                continue
            where = f"{self.path}:{number + 1}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not a line of JSON ({error}): mend the file") from None
            yield self._extract(record, where)

    def position(self) -> Any:
        """Number of lines read."""
        return self._line

    def consumed(self) -> int:
        """Number of bytes read of the file, compressed size."""
        return self._counter.bytes


class ParquetTable:
    """A parquet file with a text column."""

    def __init__(self, path: Path, name: str, extract: Extract) -> None:
        self.path, self.name, self._extract = path, name, extract
        self.size: int | None = path.stat().st_size
        self._row = 0
        self._rows = 0

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every row; skips whole row groups before the position."""
        import pyarrow
        import pyarrow.parquet

        self._row = int(position or 0)
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                self._rows = file.metadata.num_rows
                columns = self._columns(file.schema_arrow.names)
                first = 0
                for group in range(file.metadata.num_row_groups):
                    end = first + file.metadata.row_group(group).num_rows
                    if end > self._row:
                        yield from self._group(file, group, first, columns)
                    first = end
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{self.path}: not a readable parquet file ({error}): fetch it again"
            ) from error

    def _group(self, file: Any, group: int, first: int, columns: list[str]) -> Iterator[str | None]:
        number = first
        # few rows at a time: a dictionary can hold in a few kilobytes what unpacks to gigabytes
        for batch in file.iter_batches(batch_size=16, row_groups=[group], columns=columns):
            if number + batch.num_rows <= self._row:
                number += batch.num_rows
                continue
            for record in batch.to_pylist():
                number += 1
                if number > self._row:
                    self._row = number
                    yield self._extract(record, f"{self.path}, row {number}")

    def _columns(self, found: list[str]) -> list[str]:
        columns = []
        for field in self._extract.fields:
            column = field if field in found else field.split(".")[0]
            if column not in found:
                raise ValueError(missing_field(str(self.path), field, found))
            columns.append(column)
        return sorted(set(columns))

    def position(self) -> Any:
        """Number of rows read."""
        return self._row

    def consumed(self) -> int:
        """Number of bytes read, estimated from the share of rows."""
        return (self.size or 0) * self._row // self._rows if self._rows else 0


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """Returns at most `count` items, evenly spaced, including the first."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


class TextList:
    """Documents that are generated rather than read.

    Args:
        name: Name in the manifest.
        size: Size in bytes of the data they are made from; None if there is none.
        make: Returns the documents, the same at every call.
    """

    def __init__(self, name: str, size: int | None, make: Callable[[], Iterable[str]]) -> None:
        self.name, self.size, self._make = name, size, make
        self._count = 0

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields every document."""
        start = self._count = int(position or 0)
        for number, text in enumerate(self._make()):
            if number >= start:
                self._count = number + 1
                yield text

    def position(self) -> Any:
        """Number of documents yielded."""
        return self._count

    def consumed(self) -> int:
        """Always 0: unknown."""
        return 0
