"""The tokens of one file of a source, in a folder that its name and its settings identify.

    tokens.bin      int32 little-endian, of all documents that pass filter and subsample
    documents.npz   lengths: tokens of each document; cut: numbers of those without an end, see
                    `Document`; sizes: bytes of each; digests: of each, if duplicates are dropped

Caps and duplicates of the source as a whole are left to whoever joins files.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Document, Documents, digest_of, without_caps
from nemo_rod.corpus.encode import Batch, Encoded, Encoder, batches, check_first
from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer_identity import Tokenizer
from nemo_rod.files import digest, interpreting, open_file, read_bytes, replacing, sync

_TOKENS = 1 << 20  # tokens of a batch
_ELSEWHERE = (  # keys that change no token of a file
    *("name", "role", "files", "path", "document_holdout", "revision", "dedup"),
    *("max_documents", "max_bytes", "max_tokens"),
)


def folder_name(spec: SourceSpec, number: int, item: Input, tokenizer: Tokenizer) -> str:
    """Returns the name of the folder of a source's file, by everything that its tokens follow from.

    Args:
        spec: the source.
        number: the file's place in the source.
        item: the file.
        tokenizer: the tokenizer of the documents.
    """
    reading = {k: v for k, v in dataclasses.asdict(spec).items() if k not in _ELSEWHERE}
    file = [item.name, item.size, item.share, item.parts, item.commit()]
    text = json.dumps([tokenizer.fingerprint, reading, file], default=str)
    return f"{number}.{digest(text.encode())[:24]}"


def write_tokens(
    spec: SourceSpec,
    number: int,
    folder: Path,
    encoder: Encoder,
    tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda consumed: None,
) -> None:
    """Tokenises one file of a source into its folder, which appears whole.

    Raises:
        ReadError: the file cannot be read; the message names it.
    """
    documents = _SizedDocuments(without_caps(spec), number, tokenizer)
    before, goes_on = documents.bytes_read(), False
    making = folder.with_name(folder.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    lengths, cut = array("q"), array("q")

    def checked_batches() -> Iterator[Batch]:
        for count, batch in enumerate(batches(documents)):
            if not count:
                check_first(tokenizer, batch)
            yield batch

    with replacing(making / "tokens.bin") as file:
        for batch, (tokens, counts) in encoder.encode(checked_batches()):
            file.write(tokens.astype("<i4").tobytes())
            if goes_on:
                lengths[-1] += counts[0]
            lengths.extend(counts[int(goes_on) :].tolist())
            goes_on = batch.goes_on
            cut.extend([len(lengths) - 1] if batch.cut else [])
            progress(batch.consumed - before)
    with replacing(making / "documents.npz") as file:
        np.savez(
            file,
            lengths=np.array(lengths, dtype=np.int64),
            cut=np.array(cut, dtype=np.int64),
            sizes=np.array(documents.sizes, dtype=np.int64),
            digests=np.frombuffer(documents.digests, dtype=np.uint8).reshape(-1, 16),
        )
    making.rename(folder)
    sync(folder.parent)


class _SizedDocuments(Documents):
    """The documents of one file, and the size and, if wanted, the digest of each."""

    def __init__(self, spec: SourceSpec, number: int, tokenizer: Tokenizer) -> None:
        state = {"input": number, "position": None, "seen": 0, "taken": 0, "bytes": 0}
        super().__init__(spec, state, None, tokenizer)
        del self.inputs[number + 1 :]
        self.sizes, self.digests = array("q"), bytearray()

    def __iter__(self) -> Iterator[Document]:
        for document in super().__iter__():
            self.sizes.append(document.bytes)
            if self.spec.dedup:
                self.digests += digest_of(document)
            yield document


class FileTokens:
    """The tokens of a file that a task has made.

    Attributes:
        sizes_D: int64 [D], bytes of each of its D documents.
        digests: uint8 [D, 16]; [0, 16] if the source keeps duplicates.
    """

    def __init__(self, folder: Path) -> None:
        self._path, path = folder / "tokens.bin", folder / "documents.npz"
        with (
            interpreting(path, cure="remove its folder, and the text is read again"),
            np.load(io.BytesIO(read_bytes(path, 1 << 32))) as file, open_file(self._path) as tokens,
        ):  # fmt: skip
            if any(member.compress_type for member in file.zip.infolist()):
                raise ValueError("it is compressed, and may hold any amount")
            lengths, self._cut = file["lengths"], file["cut"]
            self.sizes_D, self.digests = file["sizes"], file["digests"]
            self._ends_D, size = np.cumsum(lengths), os.fstat(tokens.fileno()).st_size
            is_right = len(lengths) == len(self.sizes_D) and not (lengths < 0).any()
            if not is_right or self.num_tokens * 4 != size:
                raise ValueError("its numbers are of another tokens.bin")

    @property
    def num_tokens(self) -> int:
        """Number of its tokens, without an end of any document."""
        return int([0, *self._ends_D[-1:]][-1])

    def batches(self, number: int, dropped_D: NDArray[np.bool_]) -> Iterator[tuple[Batch, Encoded]]:
        """Yields its batches as `Encoder.encode` does, without the documents that are dropped.

        They have no text and no state: whoever reads them resumes before the file, or behind it.
        """
        size = self.num_tokens
        tokens = np.memmap(self._path, "<i4", "r", shape=(size,)) if size else np.empty(0, np.int32)
        first = start = 0
        while first < len(self._ends_D):
            last = int(np.searchsorted(self._ends_D, start + _TOKENS, side="right"))
            # a batch ends behind a document that is cut
            last = int(min([last - 1, *self._cut[self._cut >= first][:1]])) + 1
            goes_on = last == first  # the document has more tokens
            ends = np.array([start + _TOKENS]) if goes_on else self._ends_D[first:last]
            lengths = np.diff(ends, prepend=start)
            kept = ~dropped_D[first : first + len(ends)]
            part = np.array(tokens[start : ends[-1]], dtype=np.int32)[np.repeat(kept, lengths)]
            texts = [""] * int(kept.sum())
            batch = Batch(texts=texts, inputs=[number] * len(texts))
            if kept[-1]:
                batch.goes_on, batch.cut = goes_on, not goes_on and last - 1 in self._cut
            first, start = last, int(ends[-1])
            yield batch, (part, lengths[kept])
