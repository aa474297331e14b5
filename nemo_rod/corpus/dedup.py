"""Exact duplicates among a source's documents, found in bounded memory.

The digests of all documents are distributed to files by their first byte, so equal documents end up
in the same file, and each file is small enough to sort. The result is one bit per document: "an
equal one came before".
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Documents, encoded
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.files import move_whole

_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("ordinal", "<u8")])
_BUCKETS = 256
_BUFFER_BYTES = 1 << 16  # per bucket


def stored_duplicates(
    folder: Path, key: str, spec: SourceSpec, progress: Callable[[int], None]
) -> NDArray[np.uint8]:
    """Returns `find_duplicates`, stored in a folder for use after an interruption.

    The key identifies the source and its files.
    """
    path = folder / f"duplicates-{key}.npy"
    if not path.is_file():
        scratch = folder / "digests"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        marks = find_duplicates(spec, scratch, progress)
        scratch.rmdir()
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as handle:
            np.save(handle, marks)
        move_whole(temporary, path)
    return np.asarray(np.load(path))


def find_duplicates(
    spec: SourceSpec, scratch: Path, progress: Callable[[int], None] = lambda consumed: None
) -> NDArray[np.uint8]:
    """Reads a source to its end and marks its exact duplicates.

    Args:
        spec: The source; its caps are ignored, since duplicates do not count against them.
        scratch: An empty folder, for 24 bytes per document; its files are removed.
        progress: Called with the number of input bytes read.

    Returns:
        uint8, one bit per document, in the format that `Documents` takes.
    """
    uncapped = dataclasses.replace(spec, max_documents=None, max_bytes=None, max_tokens=None)
    documents = Documents(uncapped)
    buffers = [bytearray() for _ in range(_BUCKETS)]
    count = 0
    for document in documents:
        digest = hashlib.blake2b(encoded(document.text), digest_size=16).digest()
        buffer = buffers[digest[0]]
        buffer += digest + count.to_bytes(8, "little")
        if len(buffer) >= _BUFFER_BYTES:
            with (scratch / f"{digest[0]:03d}").open("ab") as handle:
                handle.write(buffer)
            buffer.clear()
        count += 1
        if count % 1024 == 0:
            progress(documents.consumed())
    marks = np.zeros((count + 7) // 8, dtype=np.uint8)
    for bucket, buffer in enumerate(buffers):
        path = scratch / f"{bucket:03d}"
        spilled = b""
        if path.exists():
            spilled = path.read_bytes()
            path.unlink()
        records = np.frombuffer(spilled + buffer, dtype=_RECORD)
        ordered = records[np.lexsort((records["ordinal"], records["low"], records["high"]))]
        high, low = ordered["high"], ordered["low"]
        repeated = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        ordinals = ordered["ordinal"][1:][repeated].astype(np.int64)
        np.bitwise_or.at(marks, ordinals >> 3, (128 >> (ordinals & 7)).astype(np.uint8))
    return marks
