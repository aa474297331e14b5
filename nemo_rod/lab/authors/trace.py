"""The authors' selection trace as a curriculum, and back.

    <run>/exp_001/selected_samples.jsonl    a row per chosen block, best first, one file a launch:
        {"step": 1, "content_hash": ..., "origin": ..., "origin_tag": ..., "rho": ..., ...}

A trace holds no candidate that was dropped, so an imported curriculum has the chosen blocks alone:
they are all of its candidates, tau is their smallest score, and shares of pools are lost.

Shape suffixes: K = blocks of a step, N = blocks of the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import MOST_BYTES, digest, move_whole, replacing
from nemo_rod.lab.authors.blocks import HASHES, content_hashes
from nemo_rod.roles import ROLES
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.references.folder import hash_heads

_KEYS = ("step", "content_hash", "rho", "target_loss")


class _Step(NamedTuple):
    """A step as its last launch recorded it: where its rows begin, and their number."""

    file: Path
    offset: int
    rows: int


def import_trace(traces: Sequence[Path], store: BlockStore, out: Path) -> Curriculum:
    """Makes a curriculum of a trace.

    The files below a folder are the launches of one run, in the order of their paths. A launch that
    continues a run repeats the steps since its checkpoint: the last record of a step counts.
    Further folders are later phases, which count their steps from 1 again.

    Raises:
        ValueError: there is no trace, it has gaps or steps of different sizes, or a block of it is
            not in the store; nothing is written.
    """
    steps: list[_Step] = []
    for trace in traces:
        steps += _steps(trace)
    (size,) = {step.rows for step in steps}
    table = Table(store)
    records = [_choice(number, step, table) for number, step in enumerate(steps[:1])]
    header = CurriculumHeader(
        num_candidates=size,
        num_chosen=size,
        block_size=store.block_size,
        store=store.digest,
        tokenizer=store.tokenizer_fingerprint,
        references="authors",
        config=digest("\n".join(map(str, steps)).encode()),
        seed=0,
        sources=tuple((s.name, s.role, s.start, s.count) for s in store.sources),  # type: ignore[misc]
        scored=records[0].score is not None,
    )
    if out.exists():
        raise ValueError(f"{out} exists: choose a new file, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.importing")
    temporary.unlink(missing_ok=True)
    try:
        with Curriculum.create(temporary, header) as curriculum:
            for number, step in enumerate(steps):
                choice = _choice(number, step, table)
                if (choice.score is not None) != header.scored:
                    raise ValueError(
                        f"{step.file}: step {number + 1} and the first differ in whether they have "
                        "scores: import traces of one run"
                    )
                curriculum.append(choice)
        move_whole(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return Curriculum.open(out, read_only=True)


def export_trace(curriculum: Curriculum, store: BlockStore, out: Path) -> None:
    """Writes a curriculum as the authors' trace: chosen blocks, best first, steps from 1."""
    header = curriculum.header
    with replacing(out) as file:
        for number, record in enumerate(curriculum, start=1):
            ids = record.trained_on
            hashes = content_hashes(store, ids)
            score, loss = record.score[record.chosen], record.loss[record.chosen]
            order = np.arange(len(ids))  # an imported one keeps the order of its trace
            if header.scored and header.num_candidates > len(ids):
                order = np.argsort(-score, kind="stable")
            for i in order:
                source = header.sources[int(header.source_index(ids[i : i + 1])[0])]
                row = {
                    "step": number,
                    "content_hash": hashes[i].tobytes().hex(),
                    "origin": source.name,
                    "origin_tag": ROLES.index(source.role),
                    "rho": float(score[i]) if header.scored else None,
                    "target_loss": float(loss[i]) if header.scored else None,
                }
                file.write(f"{json.dumps(row)}\n".encode())


class Table:
    """Block ids by the authors' hash."""

    def __init__(self, store: BlockStore) -> None:
        hashes: NDArray[np.uint8]
        if (store.root / HASHES).is_file():
            hashes = np.load(store.root / HASHES, mmap_mode="r")
        else:
            hashes = np.concatenate([content_hashes(store, ids) for ids in store.chunks()])
        if hashes.shape != (len(store), 32):
            raise ValueError(
                f"{store.root / HASHES} holds {len(hashes)} hashes of {len(store)} blocks: import "
                "the blocks again"
            )
        self.root, self._hashes = store.root, hashes
        heads = hash_heads(hashes)
        self._order = np.argsort(heads, kind="stable")
        self._sorted = heads[self._order]

    def find(self, names: Sequence[str], where: str) -> NDArray[np.int64]:
        """Returns the first ids of hashes in hex, int64 [K]; `where` begins the refusal of one."""
        hashes = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(-1, 32)
        at = np.searchsorted(self._sorted, hash_heads(hashes))
        at = np.minimum(at, len(self._sorted) - 1)
        ids = self._order[at].astype(np.int64)
        same = (self._hashes[ids] == hashes).all(axis=1)
        if not same.all():
            raise ValueError(
                f"{where} has the block {names[int(np.argmin(same))]}, which is not among the "
                f"training blocks of {self.root}: import the blocks that the run trained on"
            )
        return ids


def _steps(trace: Path) -> list[_Step]:
    """Finds the steps of one phase, in order; later launches replace steps of earlier ones."""
    files = [trace] if trace.is_file() else sorted(trace.rglob("*.jsonl"))
    found: dict[int, _Step] = {}
    for file in files:
        for number, rows in groupby(_rows(file), key=lambda row: int(row[1]["step"])):
            places = [offset for offset, _ in rows]
            found[number] = _Step(file, places[0], len(places))
    if not found:
        raise ValueError(
            f"{trace} has no row of a selection trace: runs without selection write none; name "
            "the folder of a run with enable_selection"
        )
    last, size = max(found), found[min(found)].rows
    if found[last].rows < size:  # a kill cut it
        del found[last]
        last -= 1
    missing = sorted({*range(1, last + 1)} - {*found})
    if missing:
        raise ValueError(
            f"{trace} has {len(found)} of {last} steps, step {missing[0]} is missing: a curriculum "
            "needs all of them, so a trace_period of 1 and the files of every launch"
        )
    for number in range(1, last + 1):
        if (count := found[number].rows) != size:
            raise ValueError(
                f"{found[number].file}: step {number} has {count} blocks and step 1 has {size}: "
                "copy the trace again"
            )
    return [found[number] for number in range(1, last + 1)]


def _rows(file: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a file from an offset on, with theirs; a torn last row is left out."""
    with file.open("rb") as lines:
        lines.seek(offset)
        for line in iter(partial(lines.readline, MOST_BYTES), b""):
            place, offset = offset, offset + len(line)
            if len(line) == MOST_BYTES:
                raise ValueError(f"{file} has no end of line at byte {place}: copy it again")
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                if not {*_KEYS} <= row.keys():
                    raise ValueError(f"expected {', '.join(_KEYS)}")
            except (ValueError, AttributeError) as error:
                raise ValueError(
                    f"{file} has no row of a selection trace at byte {place} ({error}): name the "
                    "folder of a trace"
                ) from None
            yield place, row


def _choice(number: int, step: _Step, table: Table) -> Choice:
    """Reads the rows of a step as a choice of all of its blocks."""
    rows: Iterable[tuple[int, dict[str, Any]]] = _rows(step.file, step.offset)
    taken = [row for _, (_, row) in zip(range(step.rows), rows, strict=False)]
    ids = table.find([row["content_hash"] for row in taken], f"{step.file}: step {number + 1}")
    replay = np.array([row.get("origin_tag") == 1 for row in taken])
    values = np.array(
        [[math.nan if row[k] is None else row[k] for k in ("rho", "target_loss")] for row in taken],
        dtype=np.float32,
    )
    pool, chosen = Pool(number, ids, replay), np.arange(len(ids))
    if np.isnan(values).any():  # of a run without selection by score
        return Choice(pool, None, None, chosen, math.nan)
    return Choice(pool, values[:, 1], values[:, 0], chosen, float(values[:, 0].min()))
