"""Changes to a built source that need all of its blocks, or all sources, first.

A small source gets more held-out blocks, and replay is thinned to a multiple of the adaptation
corpus. Both choose blocks by a keyed hash of their tokens, so they do not depend on how a source
was read, and both write the source anew, next to the old one.

Shape suffixes: S = tokens per block, N = blocks of a split.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rod.corpus.hashing import holdout_values
from nemo_rod.corpus.shards import SplitWriter, map_hashes, shard_path, shard_sizes
from nemo_rod.files import read_json

LARGEST_SHARE = 5  # a floor never holds out more than a fifth of a source
_BYTES_AT_ONCE = 16 << 20
_TRAIN, _HELD, _DROPPED = 0, 1, -1
_THIN = 1 << 127  # makes another key of the holdout's seed
Values = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def raise_holdout(built: Path, target: Path, *, floor: int, seed: int) -> Path:
    """Holds out at least `floor` blocks of a source, but at most a fifth of it.

    The blocks are those with the lowest hashes for the seed of the holdout, so those already held
    out remain so.

    Returns:
        The folder with the result: `target`, or `built` if it holds out enough.
    """
    counts = [_manifest(folder)["count"] for folder in _splits(built)]
    needed = min(floor, max(1, sum(counts) // LARGEST_SHARE), sum(counts) - 1)
    if counts[_HELD] >= needed:
        return built
    values = _values(built, seed)
    limit = np.partition(np.concatenate(values), needed - 1)[needed - 1]
    # blocks with the same tokens stay together
    return _rewrite(built, target, values, lambda v, _: np.where(v <= limit, _HELD, _TRAIN), {})


def thin(built: Path, target: Path, *, share: float, seed: int) -> Path:
    """Keeps a share of the blocks of a source, of both splits alike; at least one of each.

    What is kept, by the seed of the holdout, is independent of what is held out.

    Returns:
        `target`, whose manifests record the share, in (0, 1], and the former number of training
        blocks.
    """
    of = _manifest(built)["count"]
    values = _values(built, seed ^ _THIN)
    limits = [max(int(share * 2.0**64) - 1, int(v.min(initial=2**64 - 1))) for v in values]

    def choose(v: NDArray[np.uint64], split: int) -> NDArray[np.int64]:
        return np.where(v <= np.uint64(min(limits[split], 2**64 - 1)), split, _DROPPED)

    return _rewrite(built, target, values, choose, {"thinned": {"share": share, "of": of}})


def _splits(built: Path) -> tuple[Path, Path]:
    return built, built / "holdout"


def _manifest(folder: Path) -> dict[str, Any]:
    return read_json(folder / "manifest.json", "count", "block_size", "blocks_per_shard")


def _values(built: Path, seed: int) -> Values:
    train, held = (
        np.concatenate(
            [np.empty(0, np.uint64), *(holdout_values(t, seed=seed) for t, _ in _chunks(folder))]
        )
        for folder in _splits(built)
    )
    return train, held


def _chunks(folder: Path) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """Yields the tokens, int32 [n, S], and hashes, uint8 [n, 16], of a split, in order."""
    manifest, done = _manifest(folder), 0
    count, size = manifest["count"], manifest["block_size"]
    hashes = map_hashes(folder, count)
    rows = max(1, _BYTES_AT_ONCE // (4 * size))
    for number, length in enumerate(shard_sizes(count, manifest["blocks_per_shard"])):
        tokens = np.memmap(shard_path(folder, number, "bin"), "<i4", "r", shape=(length, size))
        for first in range(0, length, rows):
            chunk = np.asarray(tokens[first : first + rows], dtype=np.int32)
            yield chunk, np.asarray(hashes[done : done + len(chunk)])
            done += len(chunk)


def _rewrite(
    built: Path,
    target: Path,
    values: Values,
    choose: Callable[[NDArray[np.uint64], int], NDArray[np.int64]],
    changes: dict[str, Any],
) -> Path:
    """Writes every block of a source to the split that `choose` gives it, or to none."""
    shutil.rmtree(target, ignore_errors=True)
    manifests = [_manifest(folder) for folder in _splits(built)]
    writers = [
        SplitWriter(folder, m["block_size"], 0, m["blocks_per_shard"])
        for folder, m in zip(_splits(target), manifests, strict=True)
    ]
    try:
        for split in (_HELD, _TRAIN):  # what was held out before comes first there
            done = 0
            for tokens, hashes in _chunks(_splits(built)[split]):
                sent = choose(values[split][done : done + len(tokens)], split)
                done += len(tokens)
                for to, writer in enumerate(writers):
                    if (sent == to).any():
                        writer.append(tokens[sent == to], hashes[sent == to])
        for writer, manifest in zip(writers, manifests, strict=True):
            writer.finish({**manifest, **changes})
    finally:
        for writer in writers:
            writer.close()
    return target
