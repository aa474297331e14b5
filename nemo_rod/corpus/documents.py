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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rod import parts
from nemo_rod.corpus.filters import parse_filter
from nemo_rod.corpus.formats import (
    MAX_DOCUMENT_BYTES,
    Extract,
    Input,
    JsonLines,
    ParquetTable,
    TextFile,
    spread,
)
from nemo_rod.files import check_name

ROLES = ("adaptation", "replay")


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A source as described by the user.

    Attributes:
        name: Name of the source in reports; also a folder name.
        role: ``adaptation`` or ``replay``.
        kind: ``text`` (a file is a document), ``jsonl``, ``parquet``, ``huggingface``, a toy
            (``debian`` or ``synthetic``), or a registered reader (`nemo_rod.parts`).
        files: Globs (** for any depth), read in sorted path order. Text and jsonl files may be
            compressed (.gz or .zst). For the toys: packages or generators.
        text_field: Field with the text (jsonl, parquet, huggingface); dotted if nested.
        filter: Condition for keeping records, such as ``language == "de"``
            (`nemo_rod.corpus.filters`).
        path: Name or folder of a Hugging Face dataset (huggingface).
        subset: Configuration of the dataset.
        split: Split of the dataset; ``all`` for every split of the configuration, by name.
        revision: Commit, branch or tag of the dataset.
        subsample: Fraction of the documents to keep, by a hash of their content: the choice does
            not depend on the rest of the corpus.
        dedup: Drop exact duplicates of an earlier document of this source (reads the source twice).
        document_holdout: Hold out whole documents rather than blocks. This leaves fewer
            near-duplicates across the split (`nemo_rod.corpus.overlap` counts them), but the same
            block may occur on both sides if documents share passages.
        max_files: Cap on the number of files, chosen evenly across the sorted paths.
        max_documents: Cap on the number of documents.
        max_bytes: Cap on their UTF-8 bytes; the last document is truncated to fit.
        max_tokens: Cap on their tokens, EODs included; the last document is truncated to fit.
    """

    name: str
    role: str
    kind: str
    files: Sequence[str] = field(default_factory=tuple)
    text_field: str = "text"
    filter: str | None = None
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    subsample: float = 1.0
    dedup: bool = False
    document_holdout: bool = False
    max_files: int | None = None
    max_documents: int | None = None
    max_bytes: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_name("source", self.name)
        self._one_of("role", ROLES)
        self._one_of("kind", parts.names("readers"))
        if isinstance(self.files, str) or not isinstance(self.files, Sequence):
            self._refuse("files", "a list of globs", self.files)
        if self.kind in parts.OURS["readers"]:  # a reader of another package may use either
            needed, other = ("path", "files") if self.kind == "huggingface" else ("files", "path")
            if not getattr(self, needed):
                self._refuse(needed, f"a value for kind {self.kind}", getattr(self, needed))
            if getattr(self, other):
                self._refuse(other, f"nothing for kind {self.kind}", getattr(self, other))
        if type(self.subsample) not in (int, float) or not 0.0 < self.subsample <= 1.0:
            self._refuse("subsample", "a share in (0, 1]", self.subsample)
        for cap in ("max_files", "max_documents", "max_bytes", "max_tokens"):
            found = getattr(self, cap)
            if found is not None and (type(found) is not int or found < 1):
                self._refuse(cap, "a positive whole number or null", found)
        if not isinstance(self.filter, str | None):
            self._refuse("filter", "a text or null", self.filter)
        try:
            parse_filter(self.filter)
        except ValueError as error:
            raise ValueError(f"source {self.name}: {error}") from None

    def _one_of(self, key: str, values: Sequence[str]) -> None:
        if getattr(self, key) not in values:
            self._refuse(key, "one of " + ", ".join(values), getattr(self, key))

    def _refuse(self, key: str, expected: str, found: object) -> None:
        raise ValueError(f"source {self.name}: {key} must be {expected}, found {found!r}")


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
        """The state from which a later pass resumes after the last document; plain JSON."""
        if not self._started:
            return dict(self._state)
        return {**self._state, "position": self.inputs[self._state["input"]].position()}

    def consumed(self) -> int:
        """Number of input bytes read so far."""
        number = self._state["input"]
        before = sum(item.size or 0 for item in self.inputs[:number])
        return before + (self.inputs[number].consumed() if self._started else 0)

    def _take(self, text: str, where: str) -> tuple[str, int] | None:
        text, data = _utf8(text)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ValueError(
                f"source {self.spec.name}: a document of {len(data) >> 20} MiB in {where} is "
                f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
            )
        if not data or not _in_subsample(data, self.spec.subsample):
            return None
        state = self._state
        state["seen"] += 1
        if self._duplicates is not None and _bit(self._duplicates, state["seen"] - 1):
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
    """The inputs of a source, in the order in which they are read."""
    inputs: list[Input] = parts.load("readers", spec.kind, key=f"source {spec.name}: kind")(spec)
    return inputs


def extract_of(spec: SourceSpec) -> Extract:
    """Returns the extraction of a record's text by the source's `text_field` and `filter`."""
    return Extract(spec.text_field, parse_filter(spec.filter))


def read_files(spec: SourceSpec) -> list[Input]:
    """Returns the local files of a source of kind text, jsonl or parquet, in order."""
    kinds = {"text": TextFile, "jsonl": JsonLines, "parquet": ParquetTable}
    extract = extract_of(spec)
    return [kinds[spec.kind](path, name, extract) for path, name in matching_files(spec)]


def matching_files(spec: SourceSpec) -> list[tuple[Path, str]]:
    """Paths of a source, with names relative to the fixed part of the glob: data may move."""
    names: dict[str, str] = {}
    for pattern in spec.files:
        expanded = os.path.expanduser(pattern)
        root = _fixed_part(expanded)
        found = [path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path)]
        if not found:
            raise ValueError(
                f"source {spec.name}: no file matches {pattern!r} in {os.getcwd()}: "
                "correct files of the source"
            )
        for path in found:
            names.setdefault(path, Path(os.path.relpath(path, root)).as_posix())
    return [(Path(path), names[path]) for path in spread(sorted(names), spec.max_files)]


def _fixed_part(pattern: str) -> str:
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder or "."


def _utf8(text: str) -> tuple[str, bytes]:
    try:
        return text, text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, valid in JSON but not in UTF-8
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text, text.encode("utf-8")


def _in_subsample(data: bytes, share: float) -> bool:
    if share >= 1.0:
        return True
    digest = hashlib.blake2b(data, digest_size=8, person=b"rod-sub-v1").digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def _bit(bits: NDArray[np.uint8], index: int) -> bool:
    return bool(bits[index >> 3] >> (7 - (index & 7)) & 1)
