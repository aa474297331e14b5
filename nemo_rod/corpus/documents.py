"""Reading: where a source's documents come from, and which of them are used.

A source is read in a fixed order (files sorted by path, records in file order). A document may be
dropped by the filter, by the subsample, as an exact duplicate of an earlier one, or by a cap. Each
decision depends only on the document's content and position, so two passes yield the same documents
on any machine, and an interrupted pass can resume in the middle.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rod import parts
from nemo_rod.corpus.formats import (
    MAX_DOCUMENT_BYTES,
    Extract,
    Input,
    JsonLines,
    ParquetTable,
    TextFile,
    spread,
)
from nemo_rod.corpus.sources import SourceSpec


class Document(NamedTuple):
    """A document in use: the index of its input, its text, and the text's size in UTF-8 bytes."""

    input: int
    text: str
    bytes: int


class Documents:
    """The documents of a source, in order, from the beginning or from where a pass stopped.

    Args:
        spec: The source.
        state: The `state` of an earlier pass; None starts from the beginning.
        duplicates: uint8, one bit per document that passed filter and subsample (packed by
            ``numpy.packbits``), set if it is to be dropped.

    Attributes:
        inputs: The files to read, in order.
    """

    def __init__(
        self,
        spec: SourceSpec,
        state: dict[str, Any] | None = None,
        duplicates: NDArray[np.uint8] | None = None,
    ) -> None:
        self.spec = spec
        self.inputs = open_inputs(spec)
        self._duplicates = duplicates
        start = {"input": 0, "position": None, "seen": 0, "taken": 0, "bytes": 0}
        self._state: dict[str, Any] = dict(state or start)
        self._started = False

    def __iter__(self) -> Iterator[Document]:
        state = self._state
        while state["input"] < len(self.inputs) and not self._full():
            current = self.inputs[state["input"]]
            self._started = True
            for text in current.records(state["position"]):
                taken = None if text is None else self._take(text, current.name)
                if taken is not None:
                    yield Document(state["input"], *taken)
                    if self._full():
                        return
            state["input"] += 1
            state["position"] = None
            self._started = False

    def state(self) -> dict[str, Any]:
        """Returns the state from which a later pass resumes after the last document, as JSON."""
        if not self._started:
            return dict(self._state)
        return {**self._state, "position": self.inputs[self._state["input"]].position()}

    def consumed(self) -> int:
        """Returns the number of input bytes read so far."""
        number = self._state["input"]
        before = sum(item.size or 0 for item in self.inputs[:number])
        return before + (self.inputs[number].consumed() if self._started else 0)

    def _take(self, text: str, where: str) -> tuple[str, int] | None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:  # half a surrogate pair, valid in JSON but not in UTF-8
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            data = text.encode("utf-8")
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ValueError(
                f"source {self.spec.name}: a document of {len(data) >> 20} MiB in {where} is "
                f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
            )
        if not data:
            return None
        if self.spec.subsample < 1.0:
            digest = hashlib.blake2b(data, digest_size=8, person=b"rod-sub-v1").digest()
            if int.from_bytes(digest, "little") >= self.spec.subsample * 2.0**64:
                return None
        state, bits = self._state, self._duplicates
        byte, bit = divmod(state["seen"], 8)
        state["seen"] += 1
        if bits is not None and bits[byte] >> (7 - bit) & 1:
            return None
        limit = self.spec.max_bytes
        if limit is not None and state["bytes"] + len(data) > limit:
            data = data[: limit - state["bytes"]]
            text = data.decode("utf-8", errors="ignore")  # drops a character cut in half
        state["bytes"] += len(data)
        state["taken"] += 1
        return text, len(data)

    def _full(self) -> bool:
        documents, size = self.spec.max_documents, self.spec.max_bytes
        return (documents is not None and self._state["taken"] >= documents) or (
            size is not None and self._state["bytes"] >= size
        )


def open_inputs(spec: SourceSpec) -> list[Input]:
    """Returns the inputs of a source, in the order in which they are read."""
    inputs: list[Input] = parts.load("readers", spec.kind, key=f"domain.sources.{spec.name}.kind")(
        spec
    )
    return inputs


def read_files(spec: SourceSpec) -> list[Input]:
    """Returns the local files of a source of kind text, jsonl or parquet, in order."""
    kinds = {"text": TextFile, "jsonl": JsonLines, "parquet": ParquetTable}
    extract = Extract(spec)
    return [kinds[spec.kind](path, name, extract) for path, name in matching_files(spec)]


def matching_files(spec: SourceSpec) -> list[tuple[Path, str]]:
    """Returns the files of a source, in order, with names that do not depend on its location.

    A name is relative to the fixed part of the glob.

    Raises:
        ValueError: A glob matches no file.
    """
    names: dict[str, str] = {}
    for pattern in spec.files:
        expanded = os.path.expanduser(pattern)
        folder = os.path.dirname(expanded)
        while glob.has_magic(folder):
            folder = os.path.dirname(folder)
        paths = [path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path)]
        if not paths:
            raise ValueError(
                f"source {spec.name}: no file matches {pattern!r} in {os.getcwd()}: "
                "correct files of the source"
            )
        for path in paths:
            names.setdefault(path, Path(os.path.relpath(path, folder or ".")).as_posix())
    return [(Path(path), names[path]) for path in spread(sorted(names), spec.max_files)]
