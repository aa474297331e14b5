"""What the data side costs: encoding, opening a store, and the lookups and records of a step.

Every time and ratio has a row of its own for how one would do it otherwise, or for what the machine
gives at best, measured in the same run and shown just below it. Times are medians over many steps
of 2048 candidates, with files in the page cache. The largest store takes 6 GB of disk in --folder,
and 5 to 10 GB of page cache; --quick leaves it out, and encodes less text.

    python benchmarks/data_plane.py --json rows.json [--quick] [--only append_ms ...] [--folder DIR]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from _encoding import encoding, workers
from _rows import Measurement, Row, Setting, median_ms, run, under

from nemo_rod.corpus import BlockStore
from nemo_rod.corpus.hashing import block_hash
from nemo_rod.corpus.shards import (
    BLOCKS_PER_SHARD,
    HASH_BYTES,
    HASH_HEADER_BYTES,
    hash_header,
    shard_path,
    shard_sizes,
)
from nemo_rod.selection import (
    Candidates,
    Curriculum,
    CurriculumHeader,
    Joint,
    References,
    SourceRow,
)
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.references.folder import ReferenceManifest, ReferenceWriter, hash_heads

NUM_CANDIDATES = 2048
BLOCK_SIZE = 4096
ROWS_AT_A_TIME = 1 << 20


# --- opening a store


def write_store(root: Path, counts: dict[tuple[str, str], int]) -> None:
    """A store whose blocks are all zeros, and take no room on the disk; by (role, source)."""
    for (role, name), size in counts.items():
        folder = root / role / name
        folder.mkdir(parents=True)
        for index, shard in enumerate(shard_sizes(size, BLOCKS_PER_SHARD)):
            for suffix, num_bytes in (("bin", 4 * BLOCK_SIZE * shard), ("idx", 42 + 20 * shard)):
                with shard_path(folder, index, suffix).open("wb") as file:
                    file.truncate(num_bytes)
        with (folder / "hash.npy").open("wb") as file:
            file.write(hash_header(size))
            file.truncate(HASH_HEADER_BYTES + HASH_BYTES * size)
            for block in (0, size - 1):  # those that opening looks at
                file.seek(HASH_HEADER_BYTES + HASH_BYTES * block)
                file.write(block_hash(name, np.zeros(BLOCK_SIZE, dtype=np.int32)))
        manifest = {"schema": 1, "source": name, "role": role, "split": "train", "count": size}
        manifest |= {"block_size": BLOCK_SIZE, "tokenizer": "benchmark", "vocab_size": 32_000}
        manifest |= {"eod_id": 0, "blocks_per_shard": BLOCKS_PER_SHARD, "digest": "benchmark"}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    listing = {"sources": [{"role": role, "name": name} for role, name in counts]}
    (root / "store.json").write_text(json.dumps(listing))


def opening(setting: Setting) -> Iterator[Row]:
    """A store of 3.5M blocks in nine sources."""
    counts = {("replay", f"source_{i}"): 375_000 for i in range(8)}
    write_store(setting.folder, {("adaptation", "new"): 500_000, **counts})
    opened = median_ms(lambda _: BlockStore(setting.folder), 30, warm_up=3)
    assert len(BlockStore(setting.folder)) == 3_500_000
    yield under("open_ms", opened, "ms", 100)
    # Otherwise: with the hashes of all blocks in memory.
    files = sorted(setting.folder.rglob("hash.npy"))
    read = median_ms(lambda _: [np.load(file) for file in files], 10, warm_up=1)
    yield Row("open_ms.all_hashes_into_memory", read, "ms")


# --- reference lookups


class HashStore:
    """The part of a block store that references ask for, with its hashes in a mapped file."""

    digest = "benchmark"
    tokenizer_fingerprint = "benchmark"
    block_size = BLOCK_SIZE

    def __init__(self, path: Path) -> None:
        self._hashes = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._hashes)

    def hashes(self, block_ids: np.ndarray) -> np.ndarray:
        return self._hashes.take(block_ids, axis=0)


def write_references(folder: Path, size: int) -> None:
    """Write a complete folder of references, and the store's hashes beside it."""
    create = partial(np.lib.format.open_memmap, mode="w+")
    hashes = create(folder / "store.npy", dtype=np.uint8, shape=(size, 16))
    rng = np.random.default_rng(0)
    for first in range(0, size, ROWS_AT_A_TIME):
        part = slice(first, min(first + ROWS_AT_A_TIME, size))
        hashes[part] = rng.integers(0, 256, (part.stop - first, 16), dtype=np.uint8)
    store = HashStore(folder / "store.npy")
    manifest = ReferenceManifest(
        model="benchmark",
        tokenizer=store.tokenizer_fingerprint,
        store=store.digest,
        block_size=BLOCK_SIZE,
        lengths=(BLOCK_SIZE,),
        start=0,
        stop=size,
        precision="fp32",
    )
    writer = ReferenceWriter(folder, manifest, store.hashes)
    while len(writer.missing):
        ids = writer.missing[:ROWS_AT_A_TIME]
        writer.append(ids, rng.random((len(ids), 1), dtype=np.float32))
    writer.close()


def lookups(name: str, size: int, goal: float, setting: Setting) -> Iterator[Row]:
    """Reference losses of a step's candidates, with the hashes compared."""
    write_references(setting.folder, size)
    # A process of its own, in which nothing but the lookups takes memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        milliseconds, megabytes = pool.apply(_look_up, (setting.folder, size))
    yield under(f"lookup_ms_{name}", milliseconds, "ms", goal)
    yield under(f"lookup_private_mb_{name}", megabytes, "MB", 20)
    # Otherwise: join by hash on the sorted hashes, as for keys whose place is not known.
    store, keys = HashStore(setting.folder / "store.npy"), _keys(size)
    losses = np.random.default_rng(0).random(size, dtype=np.float32)
    heads = hash_heads(store.hashes(np.arange(size)))
    order = np.argsort(heads)
    heads = heads[order]

    def join(number: int) -> object:
        keys_C = hash_heads(store.hashes(keys[number]))
        return losses[order[np.searchsorted(heads, keys_C)]]

    yield Row(f"lookup_ms_{name}.searchsorted", median_ms(join, 100), "ms")


def _look_up(folder: Path, size: int) -> tuple[float, float]:
    """Median milliseconds of a step's lookups, and megabytes that they take for themselves."""
    keys, before = _keys(size), _private_bytes()
    store: Any = HashStore(folder / "store.npy")
    references = References.open([folder], store)
    milliseconds = median_ms(lambda number: references[keys[number]], 400)
    return milliseconds, (_private_bytes() - before) / 1e6


def _keys(size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, size, NUM_CANDIDATES) for _ in range(420)]


def _private_bytes() -> int:
    """Memory that no file stands behind."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
    ]
    return 1024 * int(line.split()[1])


# --- candidate pools


def pools(what: str, size: int, goal: float, setting: Setting) -> Iterator[Row]:
    """The slowest way of drawing a step's candidates, at steps all over the run."""
    steps = np.random.default_rng(0).integers(0, 3 * size // NUM_CANDIDATES, 220).tolist()
    times = {}
    for balance in ("exact", "expected", "corpus"):
        source = Candidates(
            num_adaptation=size // 3,
            num_replay=size - size // 3,
            batch_size=NUM_CANDIDATES // 2,
            balance=balance,
        )
        times[balance] = median_ms(partial(_draw, source, steps), 200)
    yield under(what, max(times.values()), "ms", goal)
    # Otherwise: a shuffled list of all ids, kept in memory; at 1e9 blocks it would take 8 GB and
    # minutes to build, so there the one of a hundredth is measured.
    listed = min(size, 10**7)
    begin = time.perf_counter()
    shuffled = np.random.default_rng(0).permutation(listed)
    built = time.perf_counter() - begin
    assert len(shuffled) == listed
    yield Row(f"{what}.shuffled_list_build_ms_of_{listed}", 1e3 * built, "ms")


def _draw(source: Candidates, steps: list[int], number: int) -> object:
    return source.pool(steps[number])


# --- the curriculum


def appends(what: str, goal: float, setting: Setting) -> Iterator[Row]:
    """A step of the curriculum, on the disk."""
    source = Candidates(
        num_adaptation=10**6, num_replay=10**6, batch_size=NUM_CANDIDATES // 2, balance="exact"
    )
    header = CurriculumHeader(
        num_candidates=NUM_CANDIDATES,
        num_chosen=NUM_CANDIDATES // 2,
        block_size=BLOCK_SIZE,
        store="benchmark",
        tokenizer="benchmark",
        references="benchmark",
        config="benchmark",
        seed=source.seed,
        sources=(SourceRow("a", "adaptation", 0, 10**6), SourceRow("r", "replay", 10**6, 10**6)),
    )
    pool = source.pool(0)
    loss_C = np.random.default_rng(0).random(NUM_CANDIDATES, dtype=np.float32)
    chosen = Joint().select(pool, loss_C, header.num_chosen)
    tau = float(loss_C[chosen].min())
    path = setting.folder / "curriculum.rod"
    with Curriculum.create(path, header) as curriculum:
        pools_n = [type(pool)(n, pool.block_ids, pool.is_replay_C) for n in range(220)]
        before = path.stat().st_size

        def append(number: int) -> None:
            curriculum.append(Choice(pools_n[number], loss_C, loss_C, chosen, tau))

        value = median_ms(append, 200)
        record_bytes = (path.stat().st_size - before) // len(curriculum)
    yield under(what, value, "ms", goal)
    # Otherwise: the same bytes, raw; what the disk asks for.
    number = count()
    with open(setting.folder / "raw", "ab", buffering=0) as file:

        def raw(_: int) -> None:
            file.write(next(number).to_bytes(8, "little") + bytes(record_bytes - 8))
            os.fsync(file.fileno())

        yield Row(f"{what}.raw_write_and_fsync", median_ms(raw, 200), "ms")


MEASUREMENTS: dict[str, Measurement] = {
    "encode": encoding,
    "two_workers": workers,
    "open_ms": opening,
    "lookup_ms_3_5m": partial(lookups, "3_5m", 3_500_000, 1.0),
    "lookup_ms_100m": partial(lookups, "100m", 100_000_000, 3.0),
    "pool_ms_3_5m": partial(pools, "pool_ms_3_5m", 3_500_000, 2.0),
    "pool_ms_1e9": partial(pools, "pool_ms_1e9", 10**9, 2.0),
    "append_ms": partial(appends, "append_ms", 5.0),
}

if __name__ == "__main__":
    run(__doc__, MEASUREMENTS, not_quick=("lookup_ms_100m",))
