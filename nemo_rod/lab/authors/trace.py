"""The authors' selection trace as a curriculum, and back.

    <run>/exp_001/selected_samples.jsonl    a row per chosen block, best first, one file a launch:
        {"step": 1, "content_hash": ..., "origin": ..., "origin_tag": ..., "rho": ..., ...}

A trace holds no candidate that was dropped, so an imported curriculum has the chosen blocks alone:
they are all of its candidates, tau is their smallest score, and shares of pools are lost.

Shape suffixes: T = steps, K = blocks of a step, N = blocks of the store.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.input_files import HEAD, refuse_placeholder
from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import MOST_BYTES, digest, move_whole, open_file, replacing
from nemo_rod.lab.authors.blocks import HASHES, as_bytes, content_hashes, is_hash
from nemo_rod.roles import ROLES
from nemo_rod.selection.candidates import Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.log import Curriculum
from nemo_rod.selection.references.folder import hash_heads

_ROW = np.dtype([("step", "<i8"), ("hash", "u1", 32), ("rho", "<f4"), ("target_loss", "<f4")])
_ROW_KEYS = ("step", "content_hash", "rho", "target_loss")
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 1 << 16  # rows


def import_trace(
    traces: Sequence[Path],
    store: BlockStore,
    out: Path,
    *,
    note: Callable[[str], object] = lambda text: None,
) -> Curriculum:
    """Makes a curriculum of a trace.

    The files below a folder are the launches of one run, in the order of the numbers in their
    paths. A launch that continues a run begins again after its checkpoint: what earlier launches
    recorded from there on does not count, even if this one was stopped sooner. Further folders are
    later phases, which count their steps anew.

    Args:
        traces: a folder, or a file, for each phase.
        store: the imported blocks.
        out: file to write.
        note: called with a sentence about recorded steps that do not count.

    Raises:
        ValueError: there is no trace, it has gaps or steps of different sizes, a value has another
            type, or a block of it is not in the store; nothing is written.
    """
    if out.exists():
        raise ValueError(f"{out} exists: choose a new file, or remove it")
    phases: list[NDArray[Any]] = []
    for trace in traces:
        before = int(phases[-1]["step"][-1, 0]) if phases else 0
        phases.append(_steps(trace, note, before))
    sizes = [steps.shape[1] for steps in phases]
    if len({*sizes}) > 1:
        raise ValueError(
            f"{traces[0]} has {sizes[0]} blocks a step, and a later phase "
            f"{next(size for size in sizes if size != sizes[0])}: import phases of one run"
        )
    rows_TK, table = np.concatenate(phases), Table(store)
    values = np.stack([rows_TK["target_loss"], rows_TK["rho"]])
    is_scored = ~np.isnan(values).any(axis=(0, 2))  # [T]
    if len({*is_scored.tolist()}) > 1:
        raise ValueError(
            f"{traces[0]}: steps {int(np.argmin(is_scored)) + 1} and "
            f"{int(np.argmax(is_scored)) + 1} differ in whether all rows have rho and target_loss: "
            "import traces of one run"
        )
    header = CurriculumHeader(
        num_candidates=sizes[0],
        num_chosen=sizes[0],
        block_size=store.block_size,
        store=store.digest,
        tokenizer=store.tokenizer_fingerprint,
        references="authors",
        config=digest(rows_TK.tobytes()),
        seed=0,
        sources=tuple((s.name, s.role, s.start, s.count) for s in store.sources),  # type: ignore[misc]
        scored=bool(is_scored[0]),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.importing")
    temporary.unlink(missing_ok=True)
    try:
        with Curriculum.create(temporary, header) as curriculum:
            for step, rows_K in enumerate(rows_TK):
                ids_K = table.find(rows_K["hash"], f"step {step + 1} of {traces[0]}")
                pool, chosen_K = Pool(step, ids_K, store.is_replay(ids_K)), np.arange(sizes[0])
                if not header.scored:
                    curriculum.append(Choice(pool, None, None, chosen_K, math.nan))
                    continue
                loss_K, score_K = values[:, step]
                tau = float(score_K.min())
                curriculum.append(Choice(pool, loss_K, score_K, chosen_K, tau))
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

    def find(self, hashes: NDArray[np.uint8], where: str) -> NDArray[np.int64]:
        """Returns the first ids of hashes [K, 32], int64 [K]; `where` begins the refusal of one."""
        at = np.searchsorted(self._sorted, hash_heads(hashes))
        at = np.minimum(at, len(self._sorted) - 1)
        ids = self._order[at].astype(np.int64)
        same = (self._hashes[ids] == hashes).all(axis=1)
        if not same.all():
            raise ValueError(
                f"{where} has the block {hashes[int(np.argmin(same))].tobytes().hex()}, which is "
                f"not among the training blocks of {self.root}: import the blocks that the run "
                "trained on"
            )
        return ids


def _steps(trace: Path, note: Callable[[str], object], before: int) -> NDArray[Any]:
    """Returns the steps of one phase, `_ROW` [T, K], of each its last record."""
    if not trace.exists():
        raise ValueError(f"{trace} does not exist: name the folder of a run")
    for path in trace.rglob("*"):
        if path.is_symlink() and path.is_dir():  # rglob passes it by
            raise ValueError(f"{path} is a link to a folder: put that folder in its place")
    run, last = np.empty(0, _ROW), 0
    begins = dict[tuple[Path, int], Path]()
    for file in sorted(_files(trace), key=_number):
        launch = _launch(file)
        if len(launch):
            last, first = max(last, int(launch["step"][-1])), int(launch["step"][0])
            if (beside := begins.setdefault((file.parent, first), file)) != file:
                raise ValueError(
                    f"{beside} and {file.name} beside it both begin with step {first}: a launch "
                    "has one file, and a folder of its own; leave out the one that does not count"
                )
            run = np.concatenate([run[run["step"] < first], launch])
    if not len(run):
        raise ValueError(
            f"{trace} has no row of a selection trace: runs without selection write none; name "
            "the folder of a run with enable_selection"
        )
    steps, counts = np.unique(run["step"], return_counts=True)
    if len(steps) > 1 and counts[-1] < counts[0]:  # a kill cut it
        run, steps, counts = run[: -counts[-1]], steps[:-1], counts[:-1]
    # some count from 0, and some on from the last step `before`
    first = int(steps[0]) if steps[0] in (0, before + 1) else 1
    if (missing := np.flatnonzero(steps != first + np.arange(len(steps)))).size:
        raise ValueError(
            f"{trace} has {len(steps)} of {steps[-1] - first + 1} steps, step "
            f"{first + missing[0]} is missing: a curriculum needs all of them, so a trace_period "
            "of 1 and the files of every launch"
        )
    if (other := np.flatnonzero(counts != counts[0])).size:
        raise ValueError(
            f"{trace}: step {steps[other[0]]} has {counts[other[0]]} blocks and step {first} has "
            f"{counts[0]}: copy the trace again, with a file for each launch"
        )
    if last > steps[-1]:
        note(
            f"{trace} has records up to step {last}: those after step {steps[-1]} do not count, as "
            "they are incomplete or the last launch began again before them"
        )
    return run.reshape(len(steps), -1)


def _files(trace: Path) -> list[Path]:
    """Returns the files of a trace; hidden ones and their folders are left out."""
    if trace.is_file():
        return [trace]
    below = [f for f in trace.rglob("*") if "/." not in f"/{f.relative_to(trace).as_posix()}"]
    if packed := [file for file in below if re.search(r"\.jsonl\.(gz|bz2|xz|zst|zip)$", file.name)]:
        raise ValueError(f"{packed[0]} is compressed: unpack it, as it is part of the trace")
    return [file for file in below if file.suffix == ".jsonl" and file.is_file()]


def _number(file: Path) -> list[Any]:
    """Returns the key that sorts paths by the numbers in them: exp_9 before exp_10."""
    words = re.split(r"([0-9]+)", str(file))
    return [int(word) if number % 2 else word for number, word in enumerate(words)]


def _launch(file: Path) -> NDArray[Any]:
    """Reads the rows of one launch, `_ROW`, by their steps; a torn last row is left out."""
    chunks, rows = [np.empty(0, _ROW)], list[tuple[Any, ...]]()
    with open_file(file) as lines:
        refuse_placeholder(file, lines.read(HEAD))
        lines.seek(0)
        for number, line in enumerate(iter(partial(lines.readline, MOST_BYTES), b""), start=1):
            if len(line) == MOST_BYTES:
                raise ValueError(f"{file}, row {number}, has no end of line: copy it again")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break
                raise ValueError(
                    f"{file}, row {number}, is no JSON ({error}): name the folder of a trace, or "
                    "remove that row, if a kill cut it"
                ) from None
            rows.append(_parse_row(row, f"{file}, row {number}"))
            if len(rows) == _CHUNK:
                chunks.append(np.array(rows, _ROW))
                rows = []
    launch = np.concatenate([*chunks, np.array(rows, _ROW)])
    step_N = launch["step"]
    pairs = np.stack([step_N.view("<u8"), hash_heads(launch["hash"])], axis=1)
    again, falls = len(pairs) - len(np.unique(pairs, axis=0)), np.flatnonzero(np.diff(step_N) < 0)
    runs = np.stack([np.searchsorted(falls, np.arange(len(step_N))), step_N])  # of rising steps
    (_, step_R), rows_R = np.unique(runs, axis=1, return_counts=True)
    steps, times = np.unique(step_R, return_counts=True)
    begins_again = np.isin(step_R[rows_R > 1], steps[times > 1]).any()
    is_long = len(step_N) >= 2 * (len(falls) + 1) * len(steps)  # not place by place
    if (begins_again and is_long) or (again and (len(falls) or 2 * again >= len(pairs))):
        raise ValueError(f"{file} has steps or blocks of one twice: split it where a launch begins")
    return launch[np.argsort(step_N, kind="stable")]


def _parse_row(row: Any, where: str) -> tuple[int, NDArray[np.uint8], float, float]:
    """Returns the values of a row, NaN for null; refuses another type than theirs."""

    def is_number(value: Any) -> bool:
        return value is None or (type(value) in (int, float) and abs(value) <= _LARGEST)

    row = row if isinstance(row, dict) else {}
    step, name, rho, loss = (row.get(key, "missing") for key in _ROW_KEYS)
    for key, is_right, expected in (
        ("step", type(step) is int and 0 <= step < 1 << 62, "a whole number"),
        ("content_hash", is_hash(name), "64 hexadecimal digits"),
        ("rho", is_number(rho), "a finite number or null"),
        ("target_loss", is_number(loss), "a finite number or null"),
    ):
        if not is_right:
            raise ValueError(
                f"{where}: {key} is {row.get(key, 'missing')!r:.80}, expected {expected}: leave "
                "out the file, if it is no selection trace, or copy it again"
            )
    return step, as_bytes([name])[0], *(math.nan if v is None else v for v in (rho, loss))
