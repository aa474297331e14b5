"""One class per input format: each yields the texts of one file and can start in its middle.

An input yields one item per record: the record's text (or its token ids, where somebody tokenised
it), or None if the filter drops it. With its `position`, which is plain JSON, `records` resumes
after the last record it yielded.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.filters import lookup, parse_filter
from nemo_rod.corpus.input_files import File
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer import Tokenizer
from nemo_rod.corpus.unpack import Counter, read_whole, split_lines

Content = str | NDArray[np.int32]  # of a document: its text, or its token ids without EOD
MAX_DOCUMENT_BYTES = 128 << 20
_ONE_LINE = "mend the file, one object a line (jq -c . FILE; of a list: jq -c '.[]' FILE)"
MAX_LINE_BYTES = 4 * MAX_DOCUMENT_BYTES  # JSON may escape characters, and has other fields


class ReadError(ValueError):
    """A source cannot be read to its end: blocks of what came before are worth keeping."""


class Input:
    """A file, or an equivalent, that texts are read from.

    Args:
        name: Name in the manifest, independent of local paths.
        size: Size in bytes; None if unknown.
        place: Where it is, for error messages; None: its name.

    Attributes:
        parts: Names and sizes of the files that it reads, if it stands for several.
        share: Share of its documents to read, by their content, beside `subsample`.
    """

    share = 1.0

    def __init__(self, name: str, size: int | None, place: str | None = None) -> None:
        self.name, self.size, self.place = name, size, place or name
        self.parts: list[tuple[str, int | None]] = []
        self._done = 0

    def use(self, tokenizer: Tokenizer) -> None:
        """Is told the tokenizer before reading; refuses token ids that are not of it."""

    def records(self, position: Any) -> Iterator[Content | None]:
        """Yields the content of every record from `position` on (None: from the beginning)."""
        raise NotImplementedError

    def where(self) -> str:
        """Returns where it is being read, for error messages."""
        return self.place

    def position(self) -> Any:
        """Returns the position after the last record: by default, the number of records read."""
        return self._done

    def consumed(self) -> int:
        """Returns the number of bytes of the file read so far; 0 if unknown."""
        return 0


class Extract:
    """Extracts the text of a record of a source if it passes the source's filter."""

    def __init__(self, spec: SourceSpec) -> None:
        self.text_field, self.comparisons = spec.text_field, parse_filter(spec.filter)
        self.fields = [spec.text_field, *(comparison.field for comparison in self.comparisons)]

    def __call__(self, record: Any, where: str) -> str | None:
        """Returns the record's text, or None if the filter drops it.

        Raises:
            ValueError: The record is not as the source describes it; begins with `where`.
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
            drop = f", or drop such records with filter: {self.text_field} != null"
            raise ValueError(
                f"{where}: field {self.text_field!r} must be text, found {text!r:.60}: "
                f"name another text_field{drop if text is None else ''}"
            )
        return text


def missing_field(where: str, field: str, fields: Iterable[str]) -> str:
    """Returns the error message for a missing field."""
    names = ", ".join(sorted(str(name) for name in fields)) or "none"
    return f"{where}: no field {field!r} (found: {names}): set text_field or filter to one of those"


class _File(Input):
    """One file; `extract` returns the text of each of its records, if it has records."""

    def __init__(self, path: File, name: str, extract: Extract) -> None:
        super().__init__(name, path.stat().st_size, str(path))
        self.path, self._extract = path, extract


class TextFile(_File):
    """A file, compressed or not, that is one document."""

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the file's text, once."""
        self._done = int(position or 0)
        if not self._done:
            data = read_whole(self.path, limit=MAX_DOCUMENT_BYTES)
            self._done = 1
            try:
                yield data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.path}: byte {error.start} is not UTF-8: convert the file"
                ) from None

    def consumed(self) -> int:
        """Returns the size of the file once it has been read, else 0."""
        return (self.size or 0) * self._done


class JsonLines(_File):
    """A JSON Lines file, compressed or not: one object with a text field per line."""

    def __init__(self, path: File, name: str, extract: Extract) -> None:
        super().__init__(path, name, extract)
        self._counter = Counter()

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every line; blank lines count as filtered."""
        start = self._done = int(position or 0)
        lines = split_lines(self.path, self._counter, limit=MAX_LINE_BYTES)
        number = 0
        for line in lines:  # enumerate would keep a long one
            number += 1
            if number <= start:
                continue
            self._done = number
            if not line.strip():
                yield None
                continue
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not a line of JSON ({error}): {_ONE_LINE}") from None
            if isinstance(record, list):
                raise ValueError(
                    f"{where}: expected an object with fields, not a list: {_ONE_LINE}"
                )
            text = self._extract(record, where)
            del line, record
            yield text
            del text

    def consumed(self) -> int:
        """Returns the number of bytes read of the file, compressed size."""
        return self._counter.bytes


class ParquetTable(_File):
    """A parquet file with a text column."""

    _rows = 0  # of the whole file, once it is open

    def records(self, position: Any) -> Iterator[str | None]:
        """Yields the text of every row; skips whole row groups before the position."""
        import pyarrow
        import pyarrow.parquet

        self._done = int(position or 0)
        try:
            source = self.path if isinstance(self.path, Path) else self.path.open("rb")
            with pyarrow.parquet.ParquetFile(source) as file:
                self._rows = file.metadata.num_rows
                names = file.schema_arrow.names
                columns = set()
                for field in self._extract.fields:
                    column = field if field in names else field.split(".")[0]
                    if column not in names:
                        raise ValueError(missing_field(str(self.path), field, names))
                    if names.count(column) > 1:
                        raise ValueError(
                            f"{self.path}: {names.count(column)} columns are named {column!r}: "
                            "remove or rename all but one of them"
                        )
                    columns.add(column)
                sizes = [
                    file.metadata.row_group(group).num_rows
                    for group in range(file.metadata.num_row_groups)
                ]
                ends = list(itertools.accumulate(sizes))
                start = self._done
                first = sum(end <= start for end in ends)
                number = sum(sizes[:first])
                # Few rows at a time: a dictionary of kilobytes can unpack to gigabytes.
                for batch in file.iter_batches(
                    batch_size=16,
                    row_groups=[*range(first, len(sizes))],
                    columns=sorted(columns),
                ):
                    skipped = min(max(0, start - number), batch.num_rows)
                    number += skipped
                    for record in batch.slice(skipped).to_pylist():
                        number += 1
                        self._done = number
                        yield self._extract(record, f"{self.path}, row {number}")
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{self.path}: not a readable parquet file ({error}): fetch it again"
            ) from error

    def consumed(self) -> int:
        """Returns the number of bytes read, estimated from the share of rows."""
        return (self.size or 0) * self._done // self._rows if self._rows else 0
