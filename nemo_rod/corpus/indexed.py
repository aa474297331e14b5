"""Megatron's indexed datasets (``PREFIX.bin`` and ``PREFIX.idx``), tokenised by its own tools."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.input_files import matching_files
from nemo_rod.corpus.sources import SourceSpec, blend
from nemo_rod.corpus.tokenizer import Tokenizer

_SAMPLE = 1000  # documents at either end of a file that show how its documents end
_HEADER_BYTES = 34


def read_indexed(spec: SourceSpec) -> list[Input]:
    """Returns the indexed datasets of a source of kind megatron, in order.

    With weights, each prefix keeps the `share` of its documents that makes its part of the tokens
    that of its weight, without a document being read twice: the scarcest keeps all.
    """
    pairs = blend(spec)
    if any("://" in prefix for _, prefix in pairs):
        raise ValueError(
            f"source {spec.name}: kind=megatron reads local files: copy the .bin and .idx files, "
            "and name their prefix"
        )
    groups = []
    weights = [weight for weight, _ in pairs if weight is not None]  # of all prefixes, or of none
    all_prefixes = [prefix for _, prefix in pairs]
    for prefixes in [[prefix] for prefix in all_prefixes] if weights else [all_prefixes]:
        patterns = [f"{prefix.removesuffix('.bin')}.bin" for prefix in prefixes]
        found = matching_files(dataclasses.replace(spec, files=patterns))
        groups.append([IndexedFile(Path(str(file)), name) for file, name in found])
    inputs = [item for group in groups for item in group]
    if weights:
        places = [item.place for item in inputs]
        if twice := {place for place in places if places.count(place) > 1}:
            raise ValueError(
                f"source {spec.name}: {min(twice)} has two weights in files: give it one"
            )
        tokens = [sum(item.tokens for item in group) for group in groups]
        wanted = [w / max(1, count) for w, count in zip(weights, tokens, strict=True)]
        for group, part in zip(groups, wanted, strict=True):
            for item in group:
                item.share = part / max(wanted)
    return [*inputs]


class IndexedFile(Input):
    """An indexed dataset; it yields the token ids of each document, int32, without its EOD.

    A document is what the index says, of one or of several sequences. An EOD at its end is the one
    that packing appends again, so the stream of blocks is that of the file; documents without one
    get it.

    Attributes:
        tokens: Number of its tokens, with EODs.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name, path.stat().st_size, str(path))
        index = path.with_suffix(".idx")
        if not index.is_file():
            raise ValueError(f"{path} has no index: {index} is missing, put it beside the .bin")
        size = index.stat().st_size
        self.parts = [(str(Path(name).with_suffix(".idx")), size)]
        with index.open("rb") as handle:
            header = handle.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or not header.startswith(b"MMIDIDX\0\0"):
            raise ValueError(f"{index} is no index of Megatron: fetch or write it again")
        _, code, sequences, ends = struct.unpack("<QBQQ", header[9:])
        expected = _HEADER_BYTES + 12 * sequences + 8 * ends
        if size != expected:
            modes = ", with the modes of a multimodal one" * (size == expected + sequences)
            raise ValueError(
                f"{index} has {size} bytes{modes}, and its counts ask for {expected}: fetch it "
                "again, or give a dataset of text"
            )
        if code not in (1, 2, 3, 4, 5, 8):  # the whole numbers among Megatron's
            raise ValueError(
                f"{index} describes values of type {code}: expected whole numbers, as token ids "
                "are; write the dataset again with a type such as int32"
            )
        if not self.size:
            raise ValueError(f"{path} is empty: leave it out")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._dataset = IndexedDataset(str(path.with_suffix("")))
        lengths = self._dataset.index.sequence_lengths
        starts = self._dataset.index.sequence_pointers
        self._ends = self._dataset.document_indices
        self._width = np.dtype(self._dataset.index.dtype).itemsize
        end = int(starts[-1]) + self._width * int(lengths[-1]) if sequences else 0
        if end != self.size:
            raise ValueError(
                f"{path} has {self.size} bytes, and its index ends at {end}: it was cut off, or "
                "belongs to another index; fetch both again"
            )
        self.tokens = self.size // self._width
        self._vocab_size, self._eod_id = 1 << 31, -1

    def use(self, tokenizer: Tokenizer) -> None:
        """Refuses a dataset whose documents do not end as those of the tokenizer."""
        self._vocab_size, self._eod_id = tokenizer.vocab_size, tokenizer.eod_id
        count = len(self._ends) - 1
        sample = {*range(min(_SAMPLE, count)), *range(max(0, count - _SAMPLE), count)}
        last, sizes = set(), set()
        for ids in map(self._document, sample):
            last.update(ids[-1:].tolist())
            sizes.add(len(ids))
        if len(last) == 1 and len(sample) > 2 and (end := last.pop()) != tokenizer.eod_id:
            raise ValueError(
                f"{self.place}: its documents end with token {end}, and those of the tokenizer "
                f"with {tokenizer.eod_id}: set domain.eod={end}, or name the tokenizer that made it"
            )
        if len(last) > 1 and len(sizes) == 1:
            raise ValueError(
                f"{self.place}: its documents have {sizes.pop()} tokens each and do not end with "
                "EOD: it holds packed blocks; give the dataset that they were packed from"
            )

    def records(self, position: Any) -> Iterator[NDArray[np.int32]]:
        """Yields the token ids of every document, int32.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        start = self._done = int(position or 0)
        for number in range(start, len(self._ends) - 1):
            ids = self._document(number)
            outside = (ids < 0) | (ids >= self._vocab_size)
            if outside.any():
                raise ValueError(
                    f"{self.place}, document {number}: id {ids[outside][0]} is outside the "
                    f"vocabulary, which has {self._vocab_size}: name in domain.tokenizer the "
                    "tokenizer that made the dataset"
                )
            self._done = number + 1
            yield ids[: len(ids) - int(len(ids) > 0 and ids[-1] == self._eod_id)].astype("<i4")

    def consumed(self) -> int:
        """Returns the number of bytes of the .bin read so far."""
        done = int(self._ends[self._done])
        starts = self._dataset.index.sequence_pointers
        return int(starts[done]) if done < len(starts) else self.size or 0

    def _document(self, number: int) -> NDArray[Any]:
        first, end = int(self._ends[number]), int(self._ends[number + 1])
        parts = [np.asarray(self._dataset[i]) for i in range(first, end)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])
