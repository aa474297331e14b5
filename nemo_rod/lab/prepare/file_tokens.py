"""The tokens of one file of a source, in a folder that its name and its settings identify.

    tokens.bin   int32 little-endian, of all documents that pass filter and subsample
    pieces.npz   lengths: tokens of each piece of a document; document: the number of its document;
                 ends: number of pieces up to the end of each batch; goes_on, cut: see `Batch`;
                 sizes: bytes of each document; digests: of each, if the source drops duplicates

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

from nemo_rod.corpus.documents import Document, Documents, digest_of, uncapped
from nemo_rod.corpus.encode import Batch, Encoded, Encoder, batches, check_first
from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer import Tokenizer
from nemo_rod.files import digest, interpreting, open_file, read_bytes, replacing, sync

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
    documents = _SizedDocuments(uncapped(spec), number, tokenizer)
    before, document = documents.consumed(), 0
    making = folder.with_name(folder.name + ".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    lengths, of, ends = list[NDArray[np.int64]](), array("q"), array("q")
    goes_on, cut = array("b"), array("b")

    def compared() -> Iterator[Batch]:
        for count, batch in enumerate(batches(documents)):
            if not count:
                check_first(tokenizer, batch)
            yield batch

    with replacing(making / "tokens.bin") as file:
        for batch, (tokens, counts) in encoder.encode(compared()):
            file.write(tokens.astype("<i4").tobytes())
            lengths.append(counts)
            for place in range(len(counts)):
                of.append(document)
                document += not (batch.goes_on and place == len(counts) - 1)
            ends.append(len(of))
            goes_on.append(batch.goes_on)
            cut.append(batch.cut)
            progress(batch.consumed - before)
    with replacing(making / "pieces.npz") as file:
        np.savez(
            file,
            lengths=np.concatenate([np.empty(0, dtype=np.int64), *lengths]),
            document=np.array(of, dtype=np.int64),
            ends=np.array(ends, dtype=np.int64),
            goes_on=np.array(goes_on, dtype=bool),
            cut=np.array(cut, dtype=bool),
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
        self._path, path = folder / "tokens.bin", folder / "pieces.npz"
        with (
            interpreting(path, cure="remove its folder, and the text is read again"),
            np.load(io.BytesIO(read_bytes(path, 1 << 32))) as file, open_file(self._path) as tokens,
        ):  # fmt: skip
            if any(member.compress_type for member in file.zip.infolist()):
                raise ValueError("it is compressed, and may hold any amount")
            self._lengths, self._document, self._ends = (
                file[name] for name in ("lengths", "document", "ends")
            )
            self._goes_on, self._cut = file["goes_on"], file["cut"]
            self.sizes_D, self.digests = file["sizes"], file["digests"]
            for rising, last in (
                (self._ends, len(self._lengths)),
                (self._document, max(0, len(self.sizes_D) - 1)),
                (np.cumsum(self._lengths) * 4, os.fstat(tokens.fileno()).st_size),
            ):
                if (np.diff(rising, prepend=0) < 0).any() or [0, *rising[-1:]][-1] != last:
                    raise ValueError("its numbers are of another tokens.bin")
            np.broadcast_arrays(self._ends, self._goes_on, self._cut)

    @property
    def num_tokens(self) -> int:
        """Number of its tokens, without an end of any document."""
        return int(self._lengths.sum())

    def batches(self, number: int, dropped_D: NDArray[np.bool_]) -> Iterator[tuple[Batch, Encoded]]:
        """Yields its batches as `Encoder.encode` does, without the documents that are dropped.

        They have no text and no state: whoever reads them resumes before the file, or behind it.
        """
        size = self.num_tokens
        tokens = np.memmap(self._path, "<i4", "r", shape=(size,)) if size else np.empty(0, np.int32)
        starts = np.concatenate([[0], np.cumsum(self._lengths)])
        begin = 0
        for end, goes_on, cut in zip(self._ends, self._goes_on, self._cut, strict=True):
            lengths = self._lengths[begin:end]
            part = np.array(tokens[starts[begin] : starts[end]], dtype=np.int32)
            kept = ~dropped_D[self._document[begin:end]]
            last = bool(kept[-1]) if len(kept) else False
            if not kept.all():
                part, lengths = part[np.repeat(kept, lengths)], lengths[kept]
            texts = [""] * len(lengths)
            batch = Batch(texts=texts, inputs=[number] * len(lengths))
            batch.goes_on, batch.cut = bool(goes_on) and last, bool(cut) and last
            begin = end
            yield batch, (part, lengths)
