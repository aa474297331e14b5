"""The base model's predictions on replay, stored for the self-distillation score.

    rho(x) = mean over the targets of KL(p_base || p_now)        (paper, appendix on proxy replay)

Of p_base, the k likeliest tokens at every position are stored, with the rest as one more outcome.
The KL over these k + 1 outcomes never exceeds the full one, equals it if k is the vocabulary size,
and is zero at the base. Like any score, it is a loss minus a reference: the cross entropy of the
stored distribution under the current model, minus that under the base. A folder of such references
is thus an ordinary one (`folder.py`), with one additional file of records, dense by block id:

    teacher.npy   token ids u2 or u4 [S, k] | log-probabilities f2 [S, k + 1] | hash u8 | crc32 u4

Shape suffixes: C = blocks, S = tokens per block, k = kept tokens, o = k + 1 outcomes.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rod.files import with_advice, write_whole
from nemo_rod.selection.arrays import Bytes, Ids, Mask, Records
from nemo_rod.selection.blocks import Blocks
from nemo_rod.selection.curriculum.record_log import crc32_rows
from nemo_rod.selection.references.folder import (
    ReferenceManifest,
    hash_heads,
    map_array,
    open_folder,
    row_bytes,
)
from nemo_rod.selection.references.rank_log import log_paths

FILE = "teacher.npy"
_DEFINITION = (
    "mean cross entropy of the reference model's {} likeliest tokens and the rest, nats, 8 partial "
    "sums, fp32"
)


def distilled_loss(top_k: int) -> str:
    """Return the loss definition of references that keep `top_k` tokens."""
    return _DEFINITION.format(top_k)


def teacher_top_k(loss: str) -> int | None:
    """Return how many tokens references with this loss definition keep; None if none."""
    found = re.fullmatch(re.escape(_DEFINITION).replace(r"\{\}", r"(\d+)"), loss)
    return int(found[1]) if found else None


def record_type(block_size: int, top_k: int, vocab_size: int) -> np.dtype[np.void]:
    """Return the dtype of one block's record; its item size is a block's size on disk."""
    return np.dtype(
        [
            ("ids", "<u2" if vocab_size <= 1 << 16 else "<u4", (block_size, top_k)),
            ("logprobs", "<f2", (block_size, top_k + 1)),
            ("head", "<u8"),
            ("check", "<u4"),
        ]
    )


def make_room(folder: Path, manifest: ReferenceManifest, vocab_size: int) -> None:
    """Create the file of records in a folder, or check that an existing one can be resumed.

    Other processes may write once this has returned.

    Raises:
        ValueError: The disk has too little space, or the file does not match the logs beside it.
    """
    file, header = folder / FILE, _header(manifest, vocab_size)
    size = len(header) + manifest.num_blocks * _type_of(manifest, vocab_size).itemsize
    if not file.exists():
        if log_paths(folder):
            raise ValueError(
                f"{file} is missing, but {folder} has logs of blocks that are in it: remove the "
                "folder to compute it again"
            )
        write_whole(file, header)
    with open(file, "rb") as found:
        if found.read(len(header)) != header or file.stat().st_size > size:
            raise ValueError(
                f"{file} is of other blocks, or of another scoring.teacher_top_k than "
                f"{teacher_top_k(manifest.loss)}: remove {folder} to compute it again"
            )
    needed, free = size - file.stat().st_blocks * 512, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{file} needs {needed / 1e9:,.1f} GB more, and {free / 1e9:,.1f} GB are free: make "
            "room, or lower scoring.teacher_top_k"
        )
    os.truncate(file, size)  # sparse until the ranks write


class TeacherWriter:
    """Writes block records in place, as one of several writers of disjoint blocks."""

    def __init__(self, folder: Path, manifest: ReferenceManifest, vocab_size: int) -> None:
        """Open the file that `make_room` created."""
        self._path, self._start = folder / FILE, manifest.start
        self._type = _type_of(manifest, vocab_size)
        self._begin = len(_header(manifest, vocab_size))
        self._fd = os.open(self._path, os.O_WRONLY)

    def write(
        self,
        block_ids: Ids,
        ids_CSk: npt.NDArray[np.integer],
        logprobs_CSo: npt.NDArray[np.float16],
        hashes: Bytes,
    ) -> None:
        """Write blocks and sync them to disk.

        Args:
            block_ids: int64 [C].
            ids_CSk: The likeliest tokens at every position, [C, S, k].
            logprobs_CSo: Their log-probabilities and that of the rest, nats, float16 [C, S, k + 1].
            hashes: Block hashes, uint8 [C, 16].

        Raises:
            OSError: The write failed, e.g. on a full disk.
        """
        records_C = np.zeros(len(block_ids), dtype=self._type)
        records_C["ids"], records_C["logprobs"] = ids_CSk, logprobs_CSo
        records_C["head"] = hash_heads(hashes)
        records_C["check"] = _checks(records_C)
        try:
            for block_id, record in zip(block_ids, records_C, strict=True):
                data = memoryview(record.tobytes())
                at = self._begin + (int(block_id) - self._start) * self._type.itemsize
                while data:
                    written = os.pwrite(self._fd, data, at)
                    data, at = data[written:], at + written
            os.fsync(self._fd)
        except OSError as error:
            raise with_advice(error, self._path) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Teacher:
    """Reads the stored predictions of the base by block id.

    Attributes:
        top_k: Number of tokens stored per position.
    """

    def __init__(self, folder: Path, manifest: ReferenceManifest, store: Blocks) -> None:
        """Use `open_teacher`."""
        self._path, self._manifest, self._store = folder / FILE, manifest, store
        dtype = _type_of(manifest, store.vocab_size)
        self._records = map_array(self._path, dtype, (manifest.num_blocks,))
        self.top_k = dtype["ids"].shape[1]

    def covers(self, block_ids: Ids) -> Mask:
        """Return which blocks have a record, bool [C]."""
        return (block_ids >= self._manifest.start) & (block_ids < self._manifest.stop)

    def __getitem__(self, block_ids: Ids) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Return token ids [C, S, k] and log-probabilities, nats [C, S, k + 1], of blocks [C].

        Raises:
            ValueError: A record is damaged, or its content differs from the block store's.
        """
        records_C: npt.NDArray[Any] = self._records[block_ids - self._manifest.start]
        for wrong_C, what in (
            (_checks(records_C) != records_C["check"], "is damaged (checksum)"),
            (
                hash_heads(self._store.hashes(block_ids)) != records_C["head"],
                "is of other content than the block store holds",
            ),
        ):
            if wrong_C.any():
                raise ValueError(
                    f"the record of block {block_ids[np.argmax(wrong_C)]} in {self._path} {what}: "
                    "restore the folder from a copy, or remove it to compute it again"
                )
        return records_C["ids"].astype(np.int32), records_C["logprobs"]


def open_teacher(paths: Iterable[str | Path], store: Blocks) -> Teacher | None:
    """Open the records of the one folder of references that has them; None if none has.

    Raises:
        ValueError: A folder is incomplete, a file is malformed, or there are two teachers.
    """
    manifests = {Path(path): open_folder(Path(path)).manifest for path in paths}
    found = [path for path in manifests if teacher_top_k(manifests[path].loss)]
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1]} both have a {FILE}: name one of the two")
    return Teacher(found[0], manifests[found[0]], store) if found else None


def _type_of(manifest: ReferenceManifest, vocab_size: int) -> np.dtype[np.void]:
    top_k = teacher_top_k(manifest.loss)
    assert top_k is not None, f"references of {manifest.loss!r} keep no tokens"
    return record_type(manifest.block_size, top_k, vocab_size)


def _header(manifest: ReferenceManifest, vocab_size: int) -> bytes:
    """Return the header that makes the records a NumPy file."""
    description = np.lib.format.dtype_to_descr(_type_of(manifest, vocab_size))
    fields = {"descr": description, "fortran_order": False, "shape": (manifest.num_blocks,)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def _checks(records_C: Records) -> npt.NDArray[np.uint32]:
    """Return the checksums of all record bytes before the checksum itself, uint32 [C]."""
    return crc32_rows(row_bytes(records_C)[:, :-4])
