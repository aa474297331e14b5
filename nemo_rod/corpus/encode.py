"""Tokenises in batches, in this process or in several, always in order.

A batch is bounded in bytes, not documents: documents differ in length by orders of magnitude, but
memory use should not. Batches are sent to the workers as they are read and returned in the same
order, so the number of workers affects only the run time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Documents
from nemo_rod.corpus.tokenizer import Tokenizer

BATCH_BYTES = 1 << 20
PIECE_CHARS = 1 << 20

Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]  # concatenated tokens, tokens per document


@dataclass
class Batch:
    """Consecutive documents and the reading state after them.

    Attributes:
        texts: Texts of the documents.
        inputs: Index of the input of each document.
        state: `Documents.state` after the last one.
        consumed: `Documents.consumed` after the last one.
    """

    texts: list[str] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    consumed: int = 0


def batches(documents: Documents) -> Iterator[Batch]:
    """Groups documents into batches of about `BATCH_BYTES`."""
    batch, size = Batch(), 0
    for document in documents:
        batch.texts.append(document.text)
        batch.inputs.append(document.input)
        size += document.bytes
        if size >= BATCH_BYTES:
            batch.state, batch.consumed = documents.state(), documents.consumed()
            yield batch
            batch, size = Batch(), 0
    batch.state, batch.consumed = documents.state(), documents.consumed()
    yield batch


_PARALLELISM = "TOKENIZERS_PARALLELISM"  # whether the library uses its own threads


class Encoder:
    """Tokenises batches; a context manager, since it must stop its workers.

    Args:
        tokenizer: The tokenizer, sent to each worker once.
        workers: Number of processes, each on one core; 1 uses the current process.
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
        return self

    def __exit__(self, *_: object) -> None:
        if self._parallelism is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = self._parallelism
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, source: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Yields each batch with its tokens, in order.

        Raises:
            BrokenProcessPool: A worker process died.
        """
        if self._pool is None:
            for batch in source:
                yield batch, encode(self._tokenizer, batch.texts)
            return
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        try:
            for batch in source:
                waiting.append((batch, self._pool.submit(_work, batch.texts)))
                if len(waiting) > 2 * self._workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for batch, future in waiting:
                yield batch, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def encode(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """Tokenises texts.

    A text of more than `PIECE_CHARS` characters is tokenised in pieces, split after a line break if
    possible: this bounds memory, at the cost of an extra token or two per split.

    Returns:
        All tokens, concatenated, int32; and the number of tokens of each text, int64.
    """
    pieces: list[str] = []
    ends = [0]  # in the pieces, of each text
    for text in texts:
        start = 0
        while len(text) - start > PIECE_CHARS:
            cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
            end = cut if cut > start else start + PIECE_CHARS
            pieces.append(text[start:end])
            start = end
        pieces.append(text[start:])
        ends.append(len(pieces))
    arrays = tokenizer.encode_batch(pieces)
    lengths = np.array([0, *map(len, arrays)], dtype=np.int64)
    totals = np.cumsum(lengths)[ends]
    tokens = np.concatenate([np.empty(0, dtype=np.int32), *arrays])
    return tokens, np.diff(totals)


_worker_tokenizer: Tokenizer  # one per worker process, set by `_start_worker`


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    os.environ[_PARALLELISM] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Exits with the parent; a worker whose parent was killed would otherwise wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(texts: list[str]) -> Encoded:
    return encode(_worker_tokenizer, texts)
