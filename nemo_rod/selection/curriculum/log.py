"""The curriculum: the candidates, scores and chosen blocks of every step.

`curriculum.rod` is a record log (`record_log.py`) with one record per step, little-endian:

    step u64 | tau f64 | block ids i64 [C] | loss f32 [C] | score f32 [C] | chosen, C bits | crc32

A record takes about 33 kB for 2048 candidates. The header gives ids and scores their meaning: the
digests of store, tokenizer, references and config, the table of sources, and the name of a score
other than `reducible_loss`. Tau is the smallest chosen score as the policy weighs it. The block id
of padding is -1. Arms without scores record NaN for loss, score and tau. If scores were estimated
(`estimates.py`), only the blocks that were trained on have a loss, that of the training step.

Shape suffixes: N = steps, C = candidates, K = chosen, S = tokens per block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from nemo_rod.files import read_json
from nemo_rod.selection.arrays import Ids, Nats, Records
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader, refuse_foreign
from nemo_rod.selection.curriculum.record_log import RecordLog

PADDING_ID = -1
LOG_MAGIC = b"RODCUR01"


@dataclass(frozen=True)
class StepRecord:
    """One step of a curriculum."""

    step: int  # optimizer step
    block_ids: Ids  # int64 [C]
    loss: Nats  # of the model before the step, nats per token, float32 [C]; NaN if unknown
    score: Nats  # reducible loss, nats per token, or the header's score, float32 [C]
    chosen: Ids  # positions of the blocks trained on, int64 [K], ascending
    threshold: float  # tau, the smallest chosen score as the policy weighs it, nats

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

    def __init__(self, log: RecordLog, header: CurriculumHeader) -> None:
        """Use `create` or `open` instead."""
        self._log, self.path, self.header = log, log.path, header
        self._dtype = _record_dtype(header.num_candidates)

    @classmethod
    def create(cls, path: str | Path, header: CurriculumHeader) -> Self:
        """Begins a curriculum.

        Raises:
            ValueError: The file exists.
        """
        path = Path(path)
        size = _record_dtype(header.num_candidates).itemsize + 4
        RecordLog.create(path, LOG_MAGIC, header.as_dict(), size)
        return cls(RecordLog(path, LOG_MAGIC), header)

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
            path: The file.
            expect: Header of this run; any difference is refused.
            resume_at: Step to be appended next; records of it and of later steps are dropped.
            read_only: Do not modify the file, so that it can be read while a run appends to it.

        Raises:
            ValueError: The file is missing, its header differs, a record is damaged, the step
                before `resume_at` has no record, or a finished arm has done more or fewer steps.
        """

        def record_size(values: dict[str, Any]) -> int:
            header = CurriculumHeader(**values)
            header.check()
            return _record_dtype(header.num_candidates).itemsize + 4

        log = RecordLog(Path(path), LOG_MAGIC, record_size, read_only=read_only)
        path, header = log.path, CurriculumHeader(**log.header)
        if expect is not None:
            refuse_foreign(path, header, expect)
        curriculum = cls(log, header)
        if resume_at is not None and resume_at < curriculum.next_step:
            curriculum.truncate(resume_at)
        valid_N = log.recover()
        steps_N = header.first_step + np.arange(len(valid_N))
        valid_N &= curriculum.records()["step"] == steps_N
        if not valid_N.all():  # a crashed writer damages nothing but the end
            step = steps_N[np.argmin(valid_N)]
            raise ValueError(
                f"{path} has a damaged record of step {step} (checksum) before whole ones: restore "
                f"the file from a copy, or resume from a checkpoint of step {step} or before"
            )
        if resume_at is not None:
            curriculum.truncate(resume_at)
        arm = path.with_name("arm.json")  # of a finished arm alone
        if read_only and arm.is_file():
            steps = read_json(arm, "kind", "steps")["steps"]
            if steps != len(curriculum):
                raise ValueError(
                    f"{path} holds {len(curriculum)} steps, but its arm.json has steps={steps}: "
                    "restore the file from a copy, or train the arm again"
                )
        return curriculum

    def __len__(self) -> int:
        return self._log.count

    @property
    def next_step(self) -> int:
        """The step to be appended next."""
        return self.header.first_step + len(self)

    def append(self, choice: Choice, *, sync: bool = True) -> None:
        """Adds the choice of the step after the last one; `sync` waits until it is on disk.

        Raises:
            ValueError: The step is out of order, or another process wrote the file.
            OSError: The write failed, e.g. on a full disk; the file is unchanged.
        """
        num_candidates, scored = self.header.num_candidates, self.header.scored
        pool, step = choice.pool, choice.pool.step
        chosen = np.asarray(choice.chosen, dtype=np.int64)
        assert pool.block_ids.shape == (num_candidates,), pool
        assert scored == (choice.loss is not None) == (choice.score is not None), "header.scored"
        assert len(np.unique(chosen)) == len(chosen) == self.header.num_chosen, chosen
        assert chosen.min() >= 0 and chosen.max() < num_candidates, chosen
        if step != self.next_step:
            raise ValueError(
                f"{self.path} expects step {self.next_step} next, found step {step}: resume from a "
                f"checkpoint of step {self.next_step} or before"
            )
        record = np.zeros((), dtype=self._dtype)
        record["step"], record["threshold"] = step, choice.threshold
        record["block_ids"] = pool.block_ids
        record["loss"] = choice.loss if scored else np.nan
        record["score"] = choice.score if scored else np.nan
        is_nan = np.isnan(record["score"]).any() or math.isnan(choice.threshold)
        assert is_nan != scored, "NaN scores"
        bits_C = np.zeros(num_candidates, dtype=bool)
        bits_C[chosen] = True
        record["chosen"] = np.packbits(bits_C, bitorder="little")
        self._log.append(np.frombuffer(record.tobytes(), np.uint8)[None], sync=sync)

    def sync(self) -> None:
        """Waits until all steps are on disk; see `RecordLog.sync`."""
        self._log.sync()

    def truncate(self, step: int) -> None:
        """Drops the records of `step` and later, so that `step` is appended next.

        Raises:
            ValueError: The preceding step was never recorded.
        """
        count = step - self.header.first_step
        if not 0 <= count <= len(self):
            raise ValueError(
                f"{self.path} holds steps {self.header.first_step} to {self.next_step - 1}, so a "
                f"run cannot continue at step {step}: resume from a checkpoint of step "
                f"{self.next_step} or before, or restore the file"
            )
        self._log.truncate(count)

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
        """Closes the file."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def records(self) -> Records:
        """Returns the records of all steps as a read-only view of the file [N]."""
        return self._log.payload().view(self._dtype).reshape(len(self))


def _record_dtype(num_candidates: int) -> np.dtype[np.void]:
    """Returns the layout of a record without its checksum."""
    return np.dtype(
        [
            ("step", "<u8"),
            ("threshold", "<f8"),
            ("block_ids", "<i8", (num_candidates,)),
            ("loss", "<f4", (num_candidates,)),
            ("score", "<f4", (num_candidates,)),
            ("chosen", "u1", ((num_candidates + 7) // 8,)),
        ]
    )
