"""What the data side costs a training step: reference lookups, candidate pools, the curriculum.

Every time has a row of its own for how one would do it otherwise, measured in the same run on the
same keys, just below it. Times are medians over many steps of 2048 candidates, with files in the
page cache. The largest store takes 6 GB of disk in --folder, and 5 to 10 GB of page cache.

    python benchmarks/data_plane.py --json rows.json [--only lookup_ms_3_5m ...] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from nemo_rod.selection import (
    Candidates,
    Curriculum,
    CurriculumHeader,
    Joint,
    ReferenceManifest,
    References,
    SourceRow,
    threshold,
)
from nemo_rod.selection.reference_folder import (
    RECORD,
    SCHEMA,
    hash_heads,
    manifest_digest,
    record_checks,
)

NUM_CANDIDATES = 2048
BLOCK_SIZE = 4096
ROWS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Row:
    """One result; a reference has no goal."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    holds: bool | None = None


def under(what: str, value: float, unit: str, goal: float) -> Row:
    """A value that should not exceed its goal."""
    return Row(what, value, unit, goal, value <= goal)


def median_ms(action: Callable[[int], object], repeats: int, warm_up: int = 20) -> float:
    """Median time of `action(0)`, `action(1)`, ..., in milliseconds."""
    times = []
    for number in range(warm_up + repeats):
        begin = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times[warm_up:]))


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
    sums = create(folder / "sums.npy", dtype=np.float32, shape=(size, 8))
    heads = create(folder / "hash.npy", dtype=np.uint64, shape=(size,))
    checks = create(folder / "check.npy", dtype=np.uint32, shape=(size,))
    hashes = create(folder / "store.npy", dtype=np.uint8, shape=(size, 16))
    rng = np.random.default_rng(0)
    for first in range(0, size, ROWS_AT_A_TIME):
        part = slice(first, min(first + ROWS_AT_A_TIME, size))
        rows = np.zeros(part.stop - first, dtype=RECORD)
        hashes[part] = rng.integers(0, 256, (len(rows), 16), dtype=np.uint8)
        rows["id"] = np.arange(part.start, part.stop)
        rows["sums"] = rng.random((len(rows), 8), dtype=np.float32)
        rows["head"] = hash_heads(hashes[part])
        sums[part], heads[part], checks[part] = rows["sums"], rows["head"], record_checks(rows)
    store = HashStore(folder / "store.npy")
    manifest = ReferenceManifest(
        model="benchmark",
        tokenizer=store.tokenizer_fingerprint,
        store=store.digest,
        block_size=BLOCK_SIZE,
        start=0,
        stop=size,
        precision="fp32",
    )
    content = {"schema": SCHEMA, **asdict(manifest), "digest": manifest_digest(manifest)}
    (folder / "manifest.json").write_text(json.dumps(content))


def lookups(what: str, size: int, goal: float, folder: Path) -> Iterator[Row]:
    """Reference losses of a step's candidates, with the hashes and checksums compared."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        write_references(Path(name), size)
        store = HashStore(Path(name) / "store.npy")
        references = References.open([name], store)
        rng = np.random.default_rng(1)
        keys = [rng.integers(0, size, NUM_CANDIDATES) for _ in range(420)]
        yield under(what, median_ms(lambda n: references[keys[n]], 400), "ms", goal)
        # Otherwise: join by hash on the sorted hashes, as for keys whose place is not known.
        heads = np.load(Path(name) / "hash.npy")
        sums = np.load(Path(name) / "sums.npy", mmap_mode="r")
        order = np.argsort(heads)
        heads = heads[order]

        def join(number: int) -> object:
            wanted = hash_heads(store.hashes(keys[number]))
            return sums[order[np.searchsorted(heads, wanted)]].sum(axis=1, dtype=np.float64)

        yield Row(f"{what}.searchsorted", median_ms(join, 100), "ms")


# --- candidate pools


def pools(what: str, size: int, goal: float, folder: Path) -> Iterator[Row]:
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


def appends(what: str, goal: float, folder: Path) -> Iterator[Row]:
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
        sources=(
            SourceRow("a", "adaptation", 0, 10**6),
            SourceRow("r", "replay", 10**6, 10**6),
        ),
    )
    pool = source.pool(0)
    loss_C = np.random.default_rng(0).random(NUM_CANDIDATES, dtype=np.float32)
    chosen = Joint().select(loss_C, pool.is_replay, header.num_chosen)
    tau = threshold(loss_C, chosen)
    record_bytes = 0
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "curriculum.rod"
        with Curriculum.create(path, header) as curriculum:
            pools_n = [type(pool)(n, pool.block_ids, pool.is_replay) for n in range(220)]
            before = path.stat().st_size

            def append(number: int) -> None:
                curriculum.append(number, pools_n[number], loss_C, loss_C, chosen, tau)

            value = median_ms(append, 200)
            record_bytes = (path.stat().st_size - before) // len(curriculum)
        yield under(what, value, "ms", goal)
        # Otherwise: the same bytes, raw; what the disk asks for.
        number = count()
        with open(Path(name) / "raw", "ab", buffering=0) as file:

            def raw(_: int) -> None:
                file.write(next(number).to_bytes(8, "little") + bytes(record_bytes - 8))
                os.fsync(file.fileno())

            yield Row(f"{what}.raw_write_and_fsync", median_ms(raw, 200), "ms")


MEASUREMENTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "lookup_ms_3_5m": lambda folder: lookups("lookup_ms_3_5m", 3_500_000, 1.0, folder),
    "lookup_ms_100m": lambda folder: lookups("lookup_ms_100m", 100_000_000, 3.0, folder),
    "pool_ms_3_5m": lambda folder: pools("pool_ms_3_5m", 3_500_000, 2.0, folder),
    "pool_ms_1e9": lambda folder: pools("pool_ms_1e9", 10**9, 2.0, folder),
    "append_ms": lambda folder: appends("append_ms", 5.0, folder),
}


def main() -> None:
    """Measure, print a table and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    rows: list[Row] = []
    print(f"{'what':<50} {'value':>12} {'unit':<5} {'goal':>8}  holds")
    for name in arguments.only:
        for row in MEASUREMENTS[name](arguments.folder):
            goal = "" if row.goal is None else f"{row.goal:g}"
            holds = {None: "", True: "yes", False: "NO"}[row.holds]
            print(f"{row.what:<50} {row.value:>12.3f} {row.unit:<5} {goal:>8}  {holds}", flush=True)
            rows.append(row)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
