"""Reading: where a source's documents come from, and which of them are used.

A source is read in a fixed order (files sorted by path, records in file order). A document may be
dropped by the filter, by the subsample, as an exact duplicate of an earlier one, or by a cap. Each
decision depends only on the document's content and position, so two passes yield the same documents
on any machine, and an interrupted pass can resume in the middle.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rod import parts
from nemo_rod.corpus.formats import (
    LONG_BYTES,
    MAX_DOCUMENT_BYTES,
    Content,
    Input,
    LongText,
    ReadError,
    whole_characters,
)
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import FULL

_END: Any = object()


class Document(NamedTuple):
    """A document in use: the index of its input, its content, and its size (text: in UTF-8)."""

    input: int
    text: Content
    bytes: int
    cut: bool = False  # truncated by its reader or a cap: no EOD follows


class Documents:
    """The documents of a source, in order, from the beginning or from where a pass stopped.

    Args:
        spec: the source.
        state: the `state` of an earlier pass; None starts from the beginning.
        duplicates: uint8, one bit per document that passed filter and subsample (packed by
            ``numpy.packbits``), set if it is to be dropped.
        tokenizer: the tokenizer whose ids a source of token ids must have.

    Attributes:
        inputs: the files to read, in order.
    """

    def __init__(
        self,
        spec: SourceSpec,
        state: dict[str, Any] | None = None,
        duplicates: NDArray[np.uint8] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.spec = spec
        self.inputs = open_inputs(spec, tokenizer)
        self.duplicates = duplicates
        start = {"input": 0, "position": None, "seen": 0, "taken": 0, "bytes": 0}
        self._state: dict[str, Any] = dict(state or start)
        self._started = False

    def __iter__(self) -> Iterator[Document]:
        """Yields the documents.

        Raises:
            ReadError: the reader failed; the message names the source and the input.
        """
        state = self._state
        while state["input"] < len(self.inputs) and not self._full():
            current = self.inputs[state["input"]]
            self._started = True
            records = current.records(state["position"])
            for number in itertools.count():
                try:
                    text = next(records, _END)
                except Exception as error:  # third-party readers raise anything
                    if isinstance(error, ReadError) or getattr(error, "errno", None) in FULL:
                        raise
                    reason = " ".join(str(error).split())[:600]
                    if type(error) is not ValueError or current.place not in reason:
                        reason = (
                            f"{current.where()}, after {number} records of this run: "
                            f"{type(error).__name__}: {reason}: {current.cure}"
                        )
                    raise ReadError(f"source {self.spec.name}: {reason}") from error
                if text is _END:
                    break
                taken = None if text is None else self._take(text, current)
                if taken is not None:
                    is_cut = current.cut or taken[2]
                    yield Document(state["input"], *taken[:2], is_cut)
                del text, taken  # frees memory before the next one is read
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

    def again(self, state: dict[str, Any], last: int) -> Documents:
        """Returns another pass from a state on, to the end of the input with the number `last`."""
        documents = copy.copy(self)
        documents.inputs, documents._state = self.inputs[: last + 1], dict(state)
        documents._started = False
        return documents

    def bytes_read(self) -> int:
        """Returns the number of input bytes read so far."""
        number = self._state["input"]
        now = self.inputs[number].bytes_read() if self._started else 0
        return now + sum(item.size or 0 for item in self.inputs[:number])

    def _take(self, text: Content, source: Input) -> tuple[Content, int, bool] | None:
        try:
            data = content_bytes(text)
        except UnicodeEncodeError:
            text = whole_characters(str(text))
            data = text.encode("utf-8")
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ReadError(
                f"source {self.spec.name}: a document of {len(data) >> 20} MiB in {source.name} is "
                f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB: split it"
            )
        if not data:
            return None
        if (share := self.spec.subsample * source.share) < 1.0:
            digest = hashlib.blake2b(data, digest_size=8, person=b"rod-sub-v1").digest()
            if int.from_bytes(digest, "little") >= share * 2.0**64:
                return None
        state, bits = self._state, self.duplicates
        byte, bit = divmod(state["seen"], 8)
        state["seen"] += 1
        if bits is not None and bits[byte] >> (7 - bit) & 1:
            return None
        limit, size = self.spec.max_bytes, len(data)
        is_cut = limit is not None and state["bytes"] + size > limit
        if limit is not None and is_cut:
            size = limit - state["bytes"]
            text = data[:size].decode("utf-8", errors="ignore")  # drops a character cut in half
            data = text.encode("utf-8")
        state["bytes"] += size
        if not data:  # it would be an end of document without a document
            return None
        state["taken"] += 1
        is_long = isinstance(text, str) and size >= LONG_BYTES
        return LongText(data) if is_long else text, size, is_cut

    def _full(self) -> bool:
        most_documents, most_bytes = self.spec.max_documents or inf, self.spec.max_bytes or inf
        return bool(self._state["taken"] >= most_documents or self._state["bytes"] >= most_bytes)


def content_bytes(text: Content) -> bytes:
    """Returns a document's content as bytes: UTF-8, or int32 little-endian."""
    if isinstance(text, LongText):
        return text.utf8
    return text.encode("utf-8") if isinstance(text, str) else text.astype("<i4").tobytes()


def open_inputs(spec: SourceSpec, tokenizer: Tokenizer | None = None) -> list[Input]:
    """Returns the inputs of a source, in the order in which they are read.

    Raises:
        ValueError: the files cannot be read, or hold the ids of another tokenizer.
    """
    try:
        inputs: list[Input] = list(parts.load("readers", spec.kind)(spec))
        if tokenizer is not None:
            for item in inputs:
                item.check_tokenizer(tokenizer)
    except ValueError as error:
        if str(error).startswith("domain.sources."):
            raise
        raise ValueError(f"source {spec.name}: {error}") from error
    except parts.FAILURES as error:
        if isinstance(error, ImportError | OSError) or spec.kind in parts.HOUSE["readers"]:
            raise
        raise ValueError(
            f"source {spec.name}: the reader {spec.kind} returns no list of inputs "
            f"({type(error).__name__}: {error}): correct it."
        ) from error
    return inputs


def find_duplicates(
    spec: SourceSpec, folder: Path, progress: Callable[[int], None] = lambda consumed: None
) -> NDArray[np.uint8]:
    """Reads a source to its end and marks its exact duplicates, in bounded memory.

    Digests of the documents are distributed to files by their first byte, so equal documents end up
    in the same file, and each file is small enough to sort.

    Args:
        spec: the source; its caps are ignored, since duplicates do not count against them.
        folder: folder for temporary, unnamed files, which take 24 bytes per document.
        progress: called with the number of input bytes read.

    Returns:
        uint8, one bit per document, in the format that `Documents` takes.
    """
    documents = Documents(without_caps(spec))

    def digests() -> Iterator[bytes]:
        for count, document in enumerate(documents, 1):
            yield digest_of(document)
            if count % 1024 == 0:
                progress(documents.bytes_read())

    return mark_repeated(digests(), folder)


def without_caps(spec: SourceSpec) -> SourceSpec:
    """Returns a source without its caps."""
    return dataclasses.replace(spec, max_documents=None, max_bytes=None, max_tokens=None)


def digest_of(document: Document) -> bytes:
    """Returns the 16 bytes by which a document is recognised when it comes again."""
    return hashlib.blake2b(content_bytes(document.text), digest_size=16).digest()


def mark_repeated(digests: Iterable[bytes], folder: Path) -> NDArray[np.uint8]:
    """Marks the documents whose digest, of 16 bytes, an earlier one has: see `find_duplicates`."""
    files = [TemporaryFile(dir=folder, buffering=1 << 16) for _ in range(256)]  # noqa: SIM115
    count = 0
    for count, digest in enumerate(digests, 1):
        files[digest[0]].write(digest + (count - 1).to_bytes(8, "little"))
    marks = np.zeros((count + 7) // 8, dtype=np.uint8)
    for file in files:
        file.seek(0)
        with file:
            high, low, ordinals = np.frombuffer(file.read(), "<u8").reshape(-1, 3).T
        order = np.lexsort((ordinals, low, high))
        repeated = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        again = ordinals[order][1:][repeated].astype(np.int64)
        np.bitwise_or.at(marks, again >> 3, (128 >> (again & 7)).astype(np.uint8))
    return marks
