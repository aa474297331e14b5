"""Tokenises in batches, in this process or in several, always in order.

A batch is bounded in bytes, not documents: documents differ in length by orders of magnitude, but
memory use should not. Batches are sent to the workers as they are read and returned in the same
order, so the number of workers affects only the run time.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Documents, content_bytes, find_duplicates
from nemo_rod.corpus.formats import LongText
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer_identity import Tokenizer

BATCH_BYTES = 1 << 20
_COMPARED, _COMPARED_CHARS = 64, 4096  # first texts of a source, and characters of each
PIECE_CHARS = 1 << 20
_SPACE = re.compile(r"(?<=\S)\s(?=\S)")
_PARALLELISM = "TOKENIZERS_PARALLELISM"  # whether the library uses its own threads
_REACH, _TRIES, _AROUND = 1 << 14, 32, 256  # characters in which to cut, cuts tried, context

Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]  # concatenated tokens, tokens per document


@dataclass
class Batch:
    """Consecutive documents and the reading state after them.

    Attributes:
        texts: texts of the documents, or their token ids, int32.
        skip: number of tokens to leave out at the beginning: see `pieces`.
        inputs: index of the input of each document.
        state: `Documents.state` after the last one.
        consumed: `Documents.bytes_read` after the last one.
        goes_on: whether the last text is a piece of a document that continues with the first text
            of the next batch; there is no `state` then.
        cut: whether the last text has no end of document: see `Document`.
    """

    texts: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    skip: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    consumed: int = 0
    goes_on: bool = False
    cut: bool = False


def batches(documents: Documents) -> Iterator[Batch]:
    """Groups documents into batches of about `BATCH_BYTES`."""
    batch, size = Batch(), 0
    for document in documents:
        batch.texts.append(document.text)
        batch.inputs.append(document.input)
        size += document.bytes
        batch.cut = document.cut
        del document  # frees memory before the next one is read
        if size >= BATCH_BYTES or batch.cut:
            batch.state, batch.consumed = documents.state(), documents.bytes_read()
            yield batch
            batch, size = Batch(), 0
    batch.state, batch.consumed = documents.state(), documents.bytes_read()
    yield batch


def check_first(tokenizer: Tokenizer, batch: Batch) -> None:
    """Refuses a tokenizer that cuts a source's first texts otherwise than its files."""
    texts = [text for text in batch.texts[:_COMPARED] if isinstance(text, str)]
    tokenizer.check([text[:_COMPARED_CHARS] for text in texts])


class Encoder:
    """Tokenises batches in `workers` processes, each on one core; 1 uses the current process.

    A context manager, which stops the workers on exit.
    """

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, found {workers}")
        self._tokenizer, self._workers = tokenizer, workers
        self._pool: ProcessPoolExecutor | None = None
        self._parallelism = os.environ.get(_PARALLELISM)

    def __enter__(self) -> Encoder:
        os.environ[_PARALLELISM] = "false"  # one worker, one core
        if self._workers > 1:
            self._pool = ProcessPoolExecutor(
                self._workers,
                # Not "fork": the tokenizer's threads do not survive it.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._tokenizer,),
            )
            try:
                self._pool.submit(os.getpid).result()
            except BrokenProcessPool:
                raise ValueError(
                    f"the {self._workers} tokenising processes cannot start, as they import the "
                    'program that calls prepare: it must be a file, with `if __name__ == "__main__"'
                    ":` before that call; or set workers=1"
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(_PARALLELISM, None)
        if self._parallelism is not None:
            os.environ[_PARALLELISM] = self._parallelism
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, documents: Documents, folder: Path) -> Iterator[tuple[Batch, Encoded]]:
        """Yields a source's batches with their tokens; `folder` has its unfinished work."""
        return self.encode(batches(documents))

    def find_duplicates(
        self, spec: SourceSpec, folder: Path, progress: Callable[[int], None]
    ) -> NDArray[np.uint8]:
        """Returns the marks of `documents.find_duplicates`."""
        return find_duplicates(spec, folder, progress)

    def encode(self, source: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Yields each batch with its tokens, in order."""
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in self._parts(source):
            # a source has only ids or only texts, so the order is preserved
            if self._pool is None or _are_ids(batch.texts):
                yield batch, encode(self._tokenizer, batch.texts, batch.skip)
                continue
            waiting.append((batch, self._pool.submit(_work, batch.texts, batch.skip)))
            if len(waiting) > 2 * self._workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for batch, future in waiting:
            yield batch, future.result()

    def _parts(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """Splits batches that hold a long document, which bounds memory."""
        for batch in source:
            if not any(map(_is_long, batch.texts)):
                yield batch
                continue
            part = Batch(consumed=batch.consumed, goes_on=True)
            for text, number in zip(batch.texts, batch.inputs, strict=True):
                for count, (piece, skip) in enumerate(pieces(self._tokenizer, text)):
                    if count:
                        yield part
                        part = Batch(skip=skip, consumed=batch.consumed, goes_on=True)
                    part.texts.append(piece)
                    part.inputs.append(number)
            part.state, part.goes_on, part.cut = batch.state, False, batch.cut
            del batch, text, piece  # frees memory before the next one is read
            yield part


def encode(tokenizer: Tokenizer, texts: Sequence[Any], skip: int = 0) -> Encoded:
    """Tokenises texts, long ones in `pieces`; token ids are returned unchanged.

    Returns:
        All tokens but the first `skip`, concatenated, int32; and the number of tokens of each text,
        int64.
    """
    if _are_ids(texts):
        arrays = [*texts]
    elif any(map(_is_long, texts)):
        cut = (pieces(tokenizer, text) for text in texts)
        arrays = [np.concatenate([tokenizer.encode_batch([p])[0][n:] for p, n in c]) for c in cut]
    else:
        arrays = tokenizer.encode_batch(texts)
        arrays[:1] = [array[skip:] for array in arrays[:1]]
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    if len(arrays) == 1:
        return arrays[0], lengths
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays]), lengths


def _are_ids(texts: Sequence[Any]) -> bool:
    return len(texts) > 0 and isinstance(texts[0], np.ndarray)  # a source has one or the other


def _is_long(text: Any) -> bool:
    return isinstance(text, LongText) or (isinstance(text, str) and len(text) > PIECE_CHARS)


def pieces(tokenizer: Tokenizer, text: str | LongText) -> Iterator[tuple[str, int]]:
    """Yields a text in one or more pieces of at most `PIECE_CHARS` characters.

    Many tokenizers treat the beginning of a text as the beginning of a word, so each piece repeats
    the end of the one before, and comes with the number of its first tokens to skip. The other
    tokens form those of the whole text, as far as the tokens around each cut show. Cuts precede
    white space, unless there is none.
    """
    rest = io.TextIOWrapper(io.BytesIO(content_bytes(text)), "utf-8", newline="")
    window, size = "", PIECE_CHARS + _AROUND  # the text from the beginning of a piece
    start = skip = 0  # first new character of the piece; number of tokens before it
    while len(window := window + rest.read(size - len(window))) > PIECE_CHARS:
        matches = _SPACE.finditer(window, max(start + 1, PIECE_CHARS - _REACH), PIECE_CHARS)
        spaces = [match.start() for match in matches]
        end = following = spaces[-1] if spaces else PIECE_CHARS
        following_skip = 0
        for cut in [*spaces[: -_TRIES - 1 : -1], *range(PIECE_CHARS, PIECE_CHARS - _TRIES, -1)]:
            context = max(0, cut - _AROUND)
            tried = [window[context : cut + _AROUND], window[context:cut]]
            whole, left = (ids.tolist() for ids in tokenizer.encode_batch(tried))
            if whole[: len(left)] == left:
                end, following, following_skip = cut, context, len(left)
                break
        yield window[:end], skip
        window, start, skip = window[following:], end - following, following_skip
    yield window, skip


_worker_tokenizer: Tokenizer  # one per worker process, set by `_start_worker`


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it

    def leave_with_parent() -> None:  # otherwise it would wait forever if that was killed
        cast(BaseProcess, multiprocessing.parent_process()).join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _work(texts: list[str], skip: int) -> Encoded:
    return encode(_worker_tokenizer, texts, skip)
