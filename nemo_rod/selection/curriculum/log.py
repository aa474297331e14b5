"""The curriculum: the candidates, scores and chosen blocks of every step.

`curriculum.rod` is an append-only file that survives being killed at any byte, little-endian:

    "RODCUR01" | length of the JSON u32 | JSON: record_size, header | crc32 of all before u32

and one record per step, with a checksum of its other bytes:

    step u64 | tau f64 | block ids i64 [C] | loss f32 [C] | score f32 [C] | chosen, C bits | crc32

The header is written atomically. A record is valid only if its checksum matches, so after a crash
the file is truncated to its last valid record.

A record takes about 33 kB for 2048 candidates. The header gives ids and scores their meaning: the
digests of store, tokenizer, references and config, the table of sources, and the name of a score
other than `reducible_loss`. Tau is the smallest weighted score among the chosen blocks. The block
id of padding is -1. Arms without scores record NaN for score and tau. Without a scoring pass, the
blocks that were trained on have the loss of the update if the policy observes it, and others NaN.

Shape suffixes: N = steps, C = candidates, K = chosen, S = tokens per block.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from nemo_rod.files import (
    MOST_BYTES,
    interpreting,
    open_file,
    read_json,
    replacing,
    with_advice,
    writing,
)
from nemo_rod.selection.arrays import Ids, Nats, Records
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader, refuse_foreign

PADDING_ID = -1
LOG_MAGIC = b"RODCUR01"
_CRC_BYTES = 4
_READ_BYTES = 1 << 24
NO_RECORDS: Records = np.empty(0, np.void)
_MOST_TORN = 1 << 28  # bytes at the end that a crash may leave, as file systems may pad a file
_APPEND = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW


@dataclass(frozen=True)
class StepRecord:
    """One step of a curriculum."""

    step: int  # optimizer step
    block_ids: Ids  # int64 [C]
    loss: Nats  # model loss before the step, nats per token, float32 [C]; NaN if unknown
    score: Nats  # reducible loss, nats per token, or the header's score, float32 [C]
    chosen: Ids  # positions of the blocks trained on, int64 [K], ascending
    threshold: float  # tau, the smallest weighted score among the chosen, nats

    @property
    def trained_on(self) -> Ids:
        """The blocks trained on, int64 [K]."""
        return self.block_ids[self.chosen]


class Curriculum:
    """A curriculum on disk at `path`, opened for appending or for reading.

    Example:
        >>> for record in Curriculum.open("arms/rod/curriculum.rod", read_only=True):
        ...     print(record.step, record.trained_on, record.threshold)
    """

    def __init__(
        self, path: Path, header: CurriculumHeader, start: int, *, read_only: bool = False
    ) -> None:
        """Use `create` or `open` instead."""
        self.path, self.header = path, header
        self._dtype = _record_dtype(header.num_candidates)
        self._start, self._read_only = start, read_only
        self._fd = os.open(path, os.O_RDONLY if read_only else _APPEND)
        self._count = (os.fstat(self._fd).st_size - start) // self._dtype.itemsize

    @classmethod
    def create(
        cls, path: str | Path, header: CurriculumHeader, records: Records = NO_RECORDS
    ) -> Self:
        """Begins a curriculum, if given with the first `records` of another one [N].

        Raises:
            ValueError: the file exists, or the header has too many candidates or sources.
        """
        path = Path(path)
        header.check()
        if path.exists():
            raise ValueError(f"{path} exists: open it to resume, or remove it to begin again")
        size = _record_dtype(header.num_candidates).itemsize
        content = {"record_size": size, "header": header.as_dict()}
        text = json.dumps(content, sort_keys=True).encode()
        head = LOG_MAGIC + len(text).to_bytes(4, "little") + text
        with replacing(path) as file:
            file.write(head + zlib.crc32(head).to_bytes(_CRC_BYTES, "little"))
            for first in range(0, len(records), rows := max(1, _READ_BYTES // size)):
                file.write(records[first : first + rows].tobytes())
        return cls(path, header, len(head) + _CRC_BYTES)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        expect: CurriculumHeader | None = None,
        resume_at: int | None = None,
        read_only: bool = False,
    ) -> Self:
        """Opens a curriculum and drops the incomplete records at its end that a crash left.

        Args:
            path: the file.
            expect: header of this run; any difference is refused.
            resume_at: step to be appended next; records of it and of later steps are dropped.
            read_only: do not modify the file, so that it can be read while a run appends to it.

        Raises:
            ValueError: the file is missing or of another kind, its header is damaged or differs, a
                record is damaged, the step before `resume_at` has no record, or a finished arm has
                done more or fewer steps.
        """
        path = Path(path)
        header, start = _read_header(path)
        if expect is not None:
            refuse_foreign(path, header, expect)
        curriculum = cls(path, header, start, read_only=read_only)
        if resume_at is not None and resume_at < curriculum.next_step:
            curriculum.truncate(resume_at)
        curriculum._recover()
        if resume_at is not None:
            curriculum.truncate(resume_at)
        arm = path.with_name("arm.json")  # only a finished arm has one
        if read_only and arm.is_file():
            steps = read_json(arm, "kind", "steps")["steps"]
            if steps != len(curriculum):
                raise ValueError(
                    f"{path} holds {len(curriculum)} steps, but its arm.json has steps={steps}: "
                    "restore the file from a copy, or train the arm again"
                )
        return curriculum

    def _recover(self) -> None:
        """Drops everything after the last valid record; refuses a damaged record before it."""
        records, size = self.records(), self._dtype.itemsize
        rows = max(1, _READ_BYTES // size)
        end, damaged = 0, len(self)  # end of the last valid record; index of the first damaged one
        for first in range(0, len(self), rows):
            part = np.array(records[first : first + rows])
            content = part.view(np.uint8).reshape(len(part), size)[:, :-_CRC_BYTES]
            valid_N = np.fromiter(map(zlib.crc32, content), np.uint32, len(part)) == part["crc"]
            whole = np.flatnonzero(valid_N)
            end = first + int(whole[-1]) + 1 if whole.size else end
            steps_N = self.header.first_step + first + np.arange(len(part))
            right_N = valid_N & (part["step"] == steps_N)
            if damaged == len(self) and not right_N.all():
                damaged = first + int(np.argmin(right_N))
            if (left := (len(self) - end) * size) > _MOST_TORN and not whole.size:
                raise ValueError(
                    f"{self.path} has {left:,} bytes after its last step, more than a crash "
                    "leaves: restore the file from a copy"
                )
        if damaged < end:  # a crash of the writer damages the end alone
            step = self.header.first_step + damaged
            raise ValueError(
                f"{self.path} has a damaged record of step {step} (checksum) before whole ones: "
                f"restore the file from a copy, or resume from a checkpoint of step {step} or "
                "before"
            )
        self._keep(end)

    def __len__(self) -> int:
        return self._count

    @property
    def next_step(self) -> int:
        """The step to be appended next."""
        return self.header.first_step + len(self)

    def append(self, choice: Choice) -> None:
        """Adds the choice of the step after the last one, which is on disk after a `sync`.

        Raises:
            ValueError: the step is out of order, or another process wrote the file.
            OSError: the write failed, e.g. on a full disk; the file is unchanged.
        """
        assert not self._read_only, f"{self.path} was opened for reading only"
        num_candidates, scored = self.header.num_candidates, self.header.scored
        pool, step = choice.pool, choice.pool.step
        chosen = np.asarray(choice.chosen, dtype=np.int64)
        assert pool.block_ids.shape == (num_candidates,), pool
        assert scored == (choice.score is not None) and not choice.is_pending, "header.scored"
        assert len(np.unique(chosen)) == len(chosen) == self.header.num_chosen, chosen
        assert chosen.min() >= 0 and chosen.max() < num_candidates, chosen
        if step != self.next_step:
            raise ValueError(
                f"{self.path} expects step {self.next_step} next, found step {step}: resume from a "
                f"checkpoint of step {self.next_step} or before"
            )
        size = os.fstat(self._fd).st_size
        if size != self._end:
            raise ValueError(
                f"{self.path} has {size} bytes where this process left {self._end}, so another one "
                "writes to it: run one job per folder"
            )
        record = np.zeros((), dtype=self._dtype)
        record["step"], record["threshold"] = step, choice.threshold
        record["block_ids"] = pool.block_ids
        record["loss"] = np.nan if choice.loss is None else choice.loss
        record["score"] = choice.score if scored else np.nan
        is_nan = np.isnan(record["score"]).any() or math.isnan(choice.threshold)
        assert is_nan != scored, "NaN scores"
        bits_C = np.zeros(num_candidates, dtype=bool)
        bits_C[chosen] = True
        record["chosen"] = np.packbits(bits_C, bitorder="little")
        record["crc"] = zlib.crc32(record.tobytes()[:-_CRC_BYTES])
        data = memoryview(record.tobytes())
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise with_advice(error, self.path) from error
        self._count += 1

    def sync(self) -> None:
        """Waits until all steps are on disk; errors as of `append`."""
        with writing(self.path):
            os.fsync(self._fd)

    def truncate(self, step: int) -> None:
        """Drops the records of `step` and later, so that `step` is appended next.

        Raises:
            ValueError: the preceding step was never recorded.
        """
        count = step - self.header.first_step
        if not 0 <= count <= len(self):
            raise ValueError(
                f"{self.path} holds steps {self.header.first_step} to {self.next_step - 1}, so a "
                f"run cannot continue at step {step}: resume from a checkpoint of step "
                f"{self.next_step} or before, or restore the file"
            )
        self._keep(count)

    def _keep(self, count: int) -> None:
        """Keeps only the first `count` records; opened for reading only, ignores the others."""
        self._count = count
        if not self._read_only and os.fstat(self._fd).st_size != self._end:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)

    def __getitem__(self, index: int) -> StepRecord:
        """Returns the record at a position, from 0; negative positions count from the end."""
        record = self.records()[range(len(self))[index]]
        count = self.header.num_candidates
        bits_C = np.unpackbits(record["chosen"], count=count, bitorder="little")
        return StepRecord(
            step=int(record["step"]),
            block_ids=record["block_ids"].astype(np.int64),
            loss=record["loss"].astype(np.float32),
            score=record["score"].astype(np.float32),
            chosen=np.flatnonzero(bits_C),
            threshold=float(record["threshold"]),
        )

    def __iter__(self) -> Iterator[StepRecord]:
        return (self[i] for i in range(len(self)))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def records(self) -> Records:
        """Returns the records of all steps as a read-only map of the file [N]."""
        if not self._count:
            return np.empty(0, dtype=self._dtype)
        return np.memmap(self.path, self._dtype, "r", offset=self._start, shape=(self._count,))

    @property
    def _end(self) -> int:
        return self._start + self._count * self._dtype.itemsize


def _read_header(path: Path) -> tuple[CurriculumHeader, int]:
    """Returns the header of a file and the place of its first record."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: check the path, or run the stage that writes it")
    with open_file(path) as file:
        head = file.read(12)
        if head[:8] != LOG_MAGIC:
            raise ValueError(
                f"{path} begins with {head[:8]!r}, expected {LOG_MAGIC!r}: it is another kind of "
                "file, or was written by another version"
            )
        if (length := int.from_bytes(head[8:], "little")) > MOST_BYTES:
            raise ValueError(f"{path} has a header of {length:,} bytes: restore it from a copy")
        head += file.read(length)
        crc = file.read(_CRC_BYTES)
    if zlib.crc32(head).to_bytes(_CRC_BYTES, "little") != crc:
        raise ValueError(f"{path} has a damaged header (checksum): restore the file from a copy")
    with interpreting(path, cure="restore it from a copy"):
        content = json.loads(head[12:])
        header = CurriculumHeader(**content["header"])
        header.check()
        size, expected = content["record_size"], _record_dtype(header.num_candidates).itemsize
        if size != expected:
            raise ValueError(f"its records have {size} bytes, not {expected}")
    return header, len(head) + _CRC_BYTES


def _record_dtype(num_candidates: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("step", "<u8"),
            ("threshold", "<f8"),
            ("block_ids", "<i8", (num_candidates,)),
            ("loss", "<f4", (num_candidates,)),
            ("score", "<f4", (num_candidates,)),
            ("chosen", "u1", ((num_candidates + 7) // 8,)),
            ("crc", "<u4"),
        ]
    )
