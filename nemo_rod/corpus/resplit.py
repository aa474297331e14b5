"""Changes to built sources that need all of their blocks, or all sources, first.

Replay is thinned to a multiple of the adaptation corpus, and small sources get more held-out
blocks. Both choose blocks by a keyed hash of their tokens, so they do not depend on how a source
was read, and both write the source anew, next to the old one.

Shape suffixes: S = tokens per block, N = blocks of a split, T = sources, K = blocks looked up.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus import shards
from nemo_rod.corpus.hashing import block_hashes, holdout_values
from nemo_rod.files import read_json

RAISED = "raised"  # manifest key: number of blocks moved to the end of the holdout
_BYTES_AT_ONCE = 16 << 20
_HASHES_AT_ONCE = 1 << 20
_TRAIN, _HELD, _DROPPED = 0, 1, -1
_SPLITS = ("", "holdout")  # their folders below that of the source
_THIN = 1 << 127  # makes another key of the holdout's seed


def most_held_out(num_blocks: float) -> float:
    """Returns how many of a source's blocks a floor holds out at most: a fifth, or one, not all."""
    return min(num_blocks - 1, max(1, num_blocks // 5))


def further_held_out(
    folders: Sequence[Path], *, floor: int, seed: int
) -> list[tuple[set[bytes], set[bytes]]]:
    """Decides which blocks are held out beyond those that `is_holdout` chooses.

    A block that one source holds out is held out in all, also if a source holds out whole
    documents. Then the sources are taken by size, the smallest first. A source that holds out fewer
    blocks than `floor`, or than a fifth of its blocks if that is less, gets more, by the lowest
    hash for the seed of the holdout. Equal blocks, of all sources, move together, and not at all if
    a source would then hold out more than a fifth of its blocks. A fifth is at least one block, but
    no source gives away its only one.

    The result depends on the sources' blocks alone, not on earlier moves.

    Args:
        folders: all sources of a store.
        floor: held-out blocks of every source at least.
        seed: seed of the holdout.

    Returns:
        For each source, the hashes of these blocks, and of those that `raise_holdout` has moved.
    """
    sources = [_Source(folder) for folder in folders]
    moved: list[set[bytes]] = [set() for _ in sources]
    held_T = np.array([source.held for source in sources])
    most_T = np.array([most_held_out(s.total) for s in sources])
    if any(source.by_document for source in sources):
        first = (s.read(c) for s in sources for c, _ in _chunks(s.folder / "holdout", s.held))
        for tokens_KS in first:  # then come those moved there
            for t, source in enumerate(sources):
                hashes, counts = source.occurrences(tokens_KS)
                new = dict(zip(hashes, counts.tolist(), strict=True))
                new = {key: n for key, n in new.items() if n and key not in moved[t]}
                moved[t].update(new)
                held_T[t] += sum(new.values())
    for t in sorted(range(len(sources)), key=lambda t: (sources[t].total, sources[t].name)):
        needed = min(floor, most_T[t])
        if held_T[t] >= needed:
            continue
        for tokens_KS in sources[t].lowest(seed):
            hashes_T, counts_T = zip(*(s.occurrences(tokens_KS) for s in sources), strict=True)
            for k, count_T in enumerate(np.transpose(counts_T)):
                fits = (count_T == 0) | (held_T + count_T <= most_T)
                if held_T[t] < needed and hashes_T[t][k] not in moved[t] and fits.all():
                    held_T += count_T
                    for other in np.flatnonzero(count_T):
                        moved[other].add(hashes_T[other][k])
            if held_T[t] >= needed:
                break
    return [(hashes, set(s.hashes(1).tolist())) for hashes, s in zip(moved, sources, strict=True)]


def raise_holdout(built: Path, target: Path, hashes: set[bytes]) -> Path:
    """Moves the training blocks with these hashes to the holdout; returns `target`."""
    known = np.isin(_Source(built).hashes(0), np.array(sorted(hashes), dtype="S16"))
    sent = np.where(known, _HELD, _TRAIN)
    held = np.full(_manifest(built / "holdout")["count"], _HELD)
    return _rewrite(built, target, (sent, held), {RAISED: int((sent == _HELD).sum())})


def thin(built: Path, target: Path, *, share: float, seed: int) -> Path:
    """Keeps a share of the blocks of a source, of both splits alike.

    It keeps at least one block of each split, and two different ones of a source without held-out
    blocks, so that one can be held out. The choice, by the seed of the holdout, is independent of
    the holdout.

    Returns:
        `target`, whose manifests record the share, in (0, 1], and the former number of training
        blocks.
    """
    of, sent = _manifest(built)["count"], []
    held_out = _manifest(built / "holdout")["count"]
    for split, below in enumerate(_SPLITS):
        values = _values(built / below, seed ^ _THIN)
        least = values.min(initial=2**64 - 1)
        if not held_out:
            least = values[values > least].min(initial=2**64 - 1)
        limit = min(max(int(share * 2.0**64) - 1, int(least)), 2**64 - 1)
        sent.append(np.where(values <= np.uint64(limit), split, _DROPPED))
    return _rewrite(built, target, sent, {"thinned": {"share": share, "of": of}})


class _Source:
    """A source as `is_holdout` splits it, even if blocks were moved since."""

    def __init__(self, folder: Path) -> None:
        train, held = (_manifest(folder / below) for below in _SPLITS)
        self.folder, self.name = folder, str(train["source"])
        self.total: int = train["count"] + held["count"]  # blocks
        self.held: int = held["count"] - held.get(RAISED, 0)  # blocks that `is_holdout` chooses
        self.by_document = train["holdout"]["unit"] == "document"
        self._manifest, self.read = train, shards.token_reader(folder, train)
        # parts of the training split: folder, first and last block
        self._parts = [(folder, 0, train["count"]), (folder / "holdout", self.held, held["count"])]

    def hashes(self, part: int) -> NDArray[np.bytes_]:
        """Maps the hashes of the blocks in training, or of those moved to the holdout, S16 [N]."""
        folder, start, end = self._parts[part]
        return shards.map_hashes(folder, end)[start:].reshape(-1).view("S16")

    def lowest(self, seed: int) -> Iterator[NDArray[np.int32]]:
        """Yields the training blocks, equal ones once, from the lowest hash on, int32 [K, S]."""
        values = np.concatenate([_values(folder, seed)[start:] for folder, start, _ in self._parts])
        places = np.unique(values, return_index=True)[1].tolist()
        rows = max(1, _BYTES_AT_ONCE // (4 * self._manifest["block_size"]))
        (train, _, count), (holdout, start, _) = self._parts
        for first in range(0, len(places), rows):
            chosen = places[first : first + rows]
            at = ((train, p) if p < count else (holdout, p - count + start) for p in chosen)
            yield self.read(np.concatenate([_read_stored(f, self._manifest, p, 1) for f, p in at]))

    def occurrences(self, tokens_KS: NDArray[np.int32]) -> tuple[list[bytes], NDArray[np.int64]]:
        """Returns the hashes that blocks have in this source, and the training blocks with each."""
        hashes = block_hashes(self.name, tokens_KS).reshape(-1).view("S16")
        known, inverse = np.unique(hashes, return_inverse=True)
        counts = np.zeros(len(known), np.int64)
        for part in (0, 1):
            all_hashes = self.hashes(part)
            for first in range(0, len(all_hashes), _HASHES_AT_ONCE):
                chunk = np.asarray(all_hashes[first : first + _HASHES_AT_ONCE])
                places = np.minimum(np.searchsorted(known, chunk), len(known) - 1)
                places = places[known[places] == chunk]
                counts += np.bincount(places, minlength=len(known))
        return hashes.tolist(), counts[inverse]


def _manifest(folder: Path) -> dict[str, Any]:
    return read_json(folder / "manifest.json", "count", "block_size", "blocks_per_shard")


def _values(folder: Path, seed: int) -> NDArray[np.uint64]:
    """Returns the hashes of the blocks of a split for a seed, uint64 [N]."""
    read = shards.token_reader(folder, _manifest(folder))
    values = [holdout_values(read(stored), seed=seed) for stored, _ in _chunks(folder)]
    return np.concatenate([np.empty(0, np.uint64), *values])


def _chunks(
    folder: Path, most: int | None = None
) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
    """Yields a split's first blocks as `_read_stored`, and their hashes, uint8 [n, 16]."""
    manifest = _manifest(folder)
    count = manifest["count"] if most is None else most
    hashes = shards.map_hashes(folder, manifest["count"])
    rows = max(1, _BYTES_AT_ONCE // (4 * manifest["block_size"]))
    for first in range(0, count, rows):
        stored = _read_stored(folder, manifest, first, min(rows, count - first))
        yield stored, np.asarray(hashes[first : first + len(stored)])


def _read_stored(folder: Path, manifest: dict[str, Any], first: int, count: int) -> NDArray[Any]:
    """Reads some blocks of a split as they are stored, [count, ...]; a map would grow to all."""
    suffix, kind, width = shards.stored_as(manifest)
    parts = []
    while count:
        number, inside = divmod(first, manifest["blocks_per_shard"])
        fit = min(count, manifest["blocks_per_shard"] - inside)
        path, place = shards.shard_path(folder, number, suffix), inside * width * kind.itemsize
        parts.append(np.fromfile(path, kind, fit * width, offset=place))
        first, count = first + fit, count - fit
    return np.concatenate(parts).reshape(-1, width)


def _rewrite(
    built: Path, target: Path, sent: Sequence[NDArray[np.int64]], changes: dict[str, Any]
) -> Path:
    """Writes every block of a source to the split that `sent` has for it, int [N], or to none."""
    shutil.rmtree(target, ignore_errors=True)
    manifests = [_manifest(built / below) for below in _SPLITS]
    writers = [
        shards.SplitWriter(target / below, manifest)
        for below, manifest in zip(_SPLITS, manifests, strict=True)
    ]
    for split in (_HELD, _TRAIN):  # blocks of the former holdout come first in the new one
        done = 0
        for blocks, hashes in _chunks(built / _SPLITS[split]):
            places = sent[split][done : done + len(blocks)]
            done += len(blocks)
            for to, writer in enumerate(writers):
                writer.append(blocks[places == to], hashes[places == to])
    for writer in writers:
        writer.finish(changes)
    return target
