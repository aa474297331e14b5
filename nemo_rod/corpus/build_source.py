"""Builds the blocks of one source, in a folder that can be resumed after any interruption.

    <folder>/out/         the training blocks, laid out as in the store
    <folder>/out/holdout/ the held-out blocks
    <folder>/state.json   the progress, written once the blocks it describes are on disk

A run that finds a state truncates the files to it and resumes reading after the last document they
contain. The files do not depend on where the run was interrupted.

Shape suffixes: S = tokens per block, N = blocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.documents import Documents, open_inputs
from nemo_rod.corpus.encode import Batch, Encoded, Encoder, check_first
from nemo_rod.corpus.formats import Input, ReadError
from nemo_rod.corpus.hashing import block_hashes, holdout_mask, is_holdout
from nemo_rod.corpus.pack import Packer
from nemo_rod.corpus.shards import SCHEMA, SplitWriter, token_reader
from nemo_rod.corpus.sources import SourceSpec
from nemo_rod.corpus.tokenizer_identity import Tokenizer, whole_characters
from nemo_rod.files import digest, write_json, write_whole

Progress = Callable[[int, int | None, str], None]  # done, total (None: unknown), label


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings shared by all sources of a store: see `prepare`."""

    tokenizer: Tokenizer
    block_size: int
    holdout_fraction: float
    holdout_seed: int
    blocks_per_shard: int
    checkpoint_seconds: float
    holdout_floor: int | None = None
    replay_ratio: float | None = None

    @property
    def floor(self) -> int:
        """Minimum number of held-out blocks of every source."""
        return least_held_out(self.holdout_fraction, self.holdout_floor)


def least_held_out(fraction: float, floor: int | None) -> int:
    """Returns the floor, or its default."""
    return int(fraction > 0) if floor is None else floor


def describe(spec: SourceSpec, settings: Settings, inputs: list[Input]) -> dict[str, Any]:
    """Returns everything that determines the blocks of a source, the first part of its manifest.

    It includes the names and sizes of the files, but not their location.
    """
    elsewhere = {"name", "role", "files", "path", "document_holdout"}
    parts = [{"name": name, "bytes": size} for i in inputs for name, size in i.parts]
    return {
        "schema": SCHEMA,
        "source": spec.name,
        "role": spec.role,
        "block_size": settings.block_size,
        "tokenizer": settings.tokenizer.fingerprint,
        "vocab_size": settings.tokenizer.vocab_size,
        "eod_id": settings.tokenizer.eod_id,
        "holdout": {
            "fraction": settings.holdout_fraction,
            "seed": settings.holdout_seed,
            "unit": "document" if spec.document_holdout else "block",
        },
        "holdout_floor": settings.holdout_floor or None,
        "replay_ratio": settings.replay_ratio if spec.role == "replay" else None,
        "blocks_per_shard": settings.blocks_per_shard,
        "reading": {k: v for k, v in asdict(spec).items() if k not in elsewhere and v != {}},
        "files": [
            {"name": i.name, "bytes": i.size, **({"share": i.share} if i.share < 1.0 else {})}
            for i in inputs
        ],
        **({"dataset_files": parts} if parts else {}),
    }


def build_source(
    folder: Path, spec: SourceSpec, settings: Settings, encoder: Encoder, progress: Progress
) -> Path:
    """Builds the blocks of a source, or resumes building them.

    A dataset on the hub is read at one commit, which is recorded, even if its branch moves.

    Returns:
        The folder to move into the store; below `folder`, which is for unfinished work.

    Raises:
        ReadError: the source cannot be read; the work up to there is kept in `folder`.
        ValueError: the source is too small for a training and a held-out block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build = _Build(folder, spec, settings)
    label = f"{spec.role}/{spec.name}"
    total = sum(file["bytes"] or 0 for file in build.description["files"]) or None
    if build.commit is not None:
        spec = replace(spec, revision=build.commit)
        build.save(build.documents)  # a resumed run reads the same commit
    duplicates = None
    if spec.dedup:
        marks = folder / f"duplicates-{build.key}.bits"  # kept for after an interruption
        if not marks.is_file():
            what = f"{label}: finding duplicates"
            bits = encoder.find_duplicates(spec, folder, lambda done: progress(done, total, what))
            write_whole(marks, bits.tobytes())
        duplicates = np.fromfile(marks, dtype=np.uint8)
    documents = Documents(spec, build.documents, duplicates, settings.tokenizer)
    saved, last = time.monotonic(), build.documents
    try:
        made = encoder.read(documents, folder) if not build.full else ()
        for number, (batch, encoded) in enumerate(made):
            if number == 0:
                check_first(settings.tokenizer, batch)
            build.add(batch, encoded)
            last = None if batch.goes_on else batch.state
            progress(batch.consumed, total, label)
            if build.full:
                break
            if last and time.monotonic() - saved >= settings.checkpoint_seconds:
                build.save(last)
                saved = time.monotonic()
    except ReadError:
        if last:
            build.save(last)
        raise
    return build.finish()


class _Build:
    """The packers and writers of a source, and their shared state."""

    def __init__(self, folder: Path, spec: SourceSpec, settings: Settings) -> None:
        self._file, self._spec, self._settings = folder / "state.json", spec, settings
        inputs = open_inputs(spec)
        self.description = describe(spec, settings, inputs)  # first part of the manifest
        self.key = digest(json.dumps(self.description).encode())
        state: Any = None
        with suppress(FileNotFoundError, ValueError):
            state = json.loads(self._file.read_text("utf-8"))
        self._inputs, self._modified = inputs, _modification_times(inputs)
        if isinstance(state, dict) and state.get("key") == self.key:
            begun = 1 + state["documents"]["input"] if state["documents"] else 0
            if state["modified"][:begun] != self._modified[:begun]:
                state = None
        else:  # it describes other blocks
            state = None
        if state is None:
            for marks in folder.glob("duplicates-*.bits"):
                marks.unlink()
            state = {"key": self.key, "documents": None, "counts": [0, 0], "rests": [[], []]}
            state |= {"tokens": 0, "taken": [0] * len(inputs)}
            state["commit"] = next((commit for i in inputs if (commit := i.commit())), None)
            state["in_place"] = [i.in_place for i in inputs if i.in_place]
        state["modified"] = self._modified
        self._state: dict[str, Any] = state
        self.documents: dict[str, Any] | None = state["documents"]  # where reading resumes
        self.commit: str | None = state.get("commit")  # revision of the source
        self.description |= {k: v for k in ("commit", "in_place") if (v := state.get(k))}
        size, eod = settings.block_size, settings.tokenizer.eod_id
        # [training, held out]; the second packer is idle unless whole documents are held out.
        self._packers = [Packer(size, eod, rest) for rest in state["rests"]]
        self._begun = False  # whether the last document continues in the next batch
        self._is_capped = False  # whether the cap on tokens has cut it off
        self._open: list[NDArray[np.int32]] = []  # its tokens, if whole documents are held out
        self._tokens, self._taken = state["tokens"], state["taken"]  # the latter by input
        out = folder / "out"
        self.writers = [
            SplitWriter(path, self.description, count)
            for path, count in zip((out, out / "holdout"), state["counts"], strict=True)
        ]
        self._read = token_reader(out, self.description)

    @property
    def full(self) -> bool:
        """Whether no token of another document fits under the cap on tokens."""
        cap = self._spec.max_tokens
        return self._is_capped or (cap is not None and not self._begun and self._tokens >= cap)

    def add(self, batch: Batch, encoded: Encoded) -> None:
        """Packs and writes a batch, up to the cap on tokens."""
        tokens, lengths = encoded
        parts = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
        cap, goes_on, eod = self._spec.max_tokens, batch.goes_on, self._settings.tokenizer.eod_id
        whole = range(int(self._begun), len(parts) - goes_on)
        if batch.texts and not isinstance(batch.texts[0], np.ndarray):
            # an EOD that a text itself begins or ends with, white space aside, is not doubled
            decode = self._settings.tokenizer.decode
            for number, part in enumerate(parts):
                cuts = [-1, *np.flatnonzero(part == eod), len(part)]
                for side, is_there in ((-1, number < whole.stop), (0, number >= whole.start)):
                    while is_there and len(cuts) > 2:
                        before, end = cuts[-2:] if side else cuts[:2]
                        if decode(part[before + 1 : end]).strip():
                            break
                        del cuts[side]
                parts[number] = part[cuts[0] + 1 : cuts[-1]]
        kept = [n for n in range(len(parts)) if len(parts[n]) or n not in whole]  # no EOD alone
        # whether the last document is cut off: then it has no EOD, and the next one follows it
        is_cut = batch.cut and kept[-1:] == [len(parts) - 1]
        parts, inputs = [parts[n] for n in kept], [batch.inputs[n] for n in kept]
        for number, (part, source) in enumerate(zip(parts, inputs, strict=True)):
            if self.full:
                parts, goes_on, is_cut = parts[:number], False, self._is_capped
                break
            is_last = number == len(parts) - 1
            self._begun = goes_on and is_last
            ends = not self._begun and not (is_cut and is_last)
            if cap is not None and cap - self._tokens < len(part) + ends:
                part = whole_characters(self._settings.tokenizer, part[: cap - self._tokens])
                parts[number], self._is_capped, is_cut = part, True, True
                self._begun = goes_on = ends = False
            self._tokens += len(parts[number]) + ends
            is_there = len(part) > 0 or number < whole.start  # the latter: earlier pieces are
            self._taken[source] += not self._begun and is_there
        fraction, seed = self._settings.holdout_fraction, self._settings.holdout_seed
        if self._spec.document_holdout:
            if self._open and parts:
                parts[0] = np.concatenate([*self._open, parts[0]])
            self._open = [parts.pop()] if goes_on else []
            held = [is_holdout(d, fraction=fraction, seed=seed) for d in parts]
            for index, packer in enumerate(self._packers):
                documents = [d for d, h in zip(parts, held, strict=True) if h == index]
                blocks = packer.add(documents, go_on=is_cut and held[-1:] == [index])
                self.writers[index].append(blocks, block_hashes(self._spec.name, blocks))
        else:
            blocks = self._packers[0].add(parts, go_on=bool(parts) and (goes_on or is_cut))
            stored: NDArray[Any] = blocks
            hashes = block_hashes(self._spec.name, blocks)
            mask = holdout_mask(blocks, fraction=fraction, seed=seed)
            if "in_place" in self.description:
                stored = sum(w.count for w in self.writers) + np.arange(len(blocks))[:, None]
                for row in stored[(self._read(stored) != blocks).any(axis=1)]:
                    raise ValueError(
                        f"source {self._spec.name}: {self._read.where(row)} has other tokens than "
                        "its documents with one EOD after each: leave out options.copy"
                    )
            for writer, chosen in zip(self.writers, (~mask, mask), strict=True):
                writer.append(stored[chosen], hashes[chosen])

    def save(self, documents: dict[str, Any] | None) -> None:
        """Makes all progress so far durable."""
        for writer in self.writers:
            writer.sync()
        self._state |= {"documents": documents, "tokens": self._tokens}
        self._state["counts"] = [writer.count for writer in self.writers]
        self._state["rests"] = [packer.rest.tolist() for packer in self._packers]
        write_json(self._file, self._state)

    def finish(self) -> Path:
        """Writes indices and manifests, if there are enough blocks; returns their folder."""
        read = 1 + max((number for number, taken in enumerate(self._taken) if taken), default=-1)
        now = _modification_times(self._inputs)[:read]
        for source, before, after in zip(self._inputs, self._modified, now, strict=False):
            if before != after:
                raise ReadError(
                    f"source {self._spec.name}: {source.place} was changed while it was read: run "
                    "again, which reads the source anew"
                )
        size, fault = self._settings.block_size, ""
        count = sum(writer.count for writer in self.writers)
        if sum(self._taken) == 0:
            fault = "no document: check its files, filter, subsample and caps"
        elif count == 0:
            fault = (
                f"{self._tokens} tokens, fewer than one block of {size}: give it more text, or "
                "make block_size smaller"
            )
        elif count == 1 and self._settings.floor:
            fault = (
                f"1 block of {size}, expected 2 or more, to train on one and hold out the other: "
                "give it more text, or make block_size smaller"
            )
        if fault:
            raise ValueError(f"{self._spec.role} source {self._spec.name} has {fault}")
        files = zip(self.description["files"], self._taken, strict=True)
        more = {
            "files": [{**file, "documents": taken} for file, taken in files],
            "documents": sum(self._taken),
            "tokens": self._tokens,
            "dropped_tokens": sum(len(packer.rest) for packer in self._packers),
        }
        for writer, split in zip(self.writers, ("train", "holdout"), strict=True):
            writer.finish({**more, "split": split})
        return self.writers[0].folder


def _modification_times(inputs: list[Input]) -> list[int | None]:
    """Returns when local files were modified, in ns: another text of the same size shows there."""
    paths: list[Any] = [getattr(each, "path", None) for each in inputs]
    is_there = [isinstance(path, Path) and path.exists() for path in paths]
    pairs = zip(paths, is_there, strict=True)
    return [path.stat().st_mtime_ns if there else None for path, there in pairs]
