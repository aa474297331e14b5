"""Blocks and traces of the authors' code: imported to the bit, written back, or refused."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import authors_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from authors_files import trace_rows, write_blocks, write_lines
from command_line import here, nemo_rod

from nemo_rod.corpus import BlockStore
from nemo_rod.lab.curriculum_tools import verify
from nemo_rod.selection import Curriculum
from nemo_rod.selection.references.folder import Folder

K = 5
Theirs = tuple[Path, list[dict]]  # a corpus of several parts, and what it holds


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    folder = tmp_path_factory.mktemp("theirs") / "blocks"
    return folder, write_blocks(folder, 600, per_part=170)


@pytest.fixture(scope="module")
def ours(theirs: Theirs) -> Path:
    out = theirs[0].parent / "store"
    here("import", "blocks", theirs[0], out, "tokenizer=byte", "check=1")
    return out


def refused(sentence: str, *words: object) -> None:
    """A command is refused in one sentence, and leaves nothing beside its input."""
    folder = next(word.parent for word in words if isinstance(word, Path))
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        here("import", *words)
    assert "\n" not in str(refusal.value) and sorted(folder.iterdir()) == before


def test_a_recipe_takes_imported_blocks_as_its_own(theirs: Theirs, tmp_path: Path) -> None:
    recipe = "recipe=toy_synthetic"
    done = nemo_rod("import", "blocks", theirs[0], tmp_path / "run", recipe)
    assert done.returncode == 0 and "4 sources" in done.stdout, done
    shown = nemo_rod("run", recipe, "dry_run=true", f"run_dir={tmp_path / 'run'}")
    (line,) = [line for line in shown.stderr.splitlines() if "text -> blocks" in line]
    assert "done" in line, shown.stderr
    short, other = tmp_path / "short", tmp_path / "other"
    write_blocks(short, 80, size=32)
    refused("a block of 32 tokens, expected 64", "blocks", short, other, recipe)
    both = ("tokenizer=byte", recipe)
    refused("either tokenizer= and eod=, or recipe=", "blocks", short, other, *both)


def test_content_hash_is_theirs() -> None:
    from nemo_rod.lab.authors.blocks import content_hash

    for origin in ("law", "é_qa", 'a"b\\c\n'):
        tokens = np.array([0, 255, 131071], dtype=np.int32)
        expected = authors_files.content_hash(origin, tokens.tolist())
        assert content_hash(origin, tokens).hex() == expected


def test_a_pool_is_the_one_their_run_drew(theirs: Theirs, tmp_path: Path) -> None:
    words = ("blocks", theirs[0], tmp_path / "store", "tokenizer=byte")
    refused("expected a number in (0, 1]", *words, "pool_share=1.5")
    here("import", *words, "pool_share=0.4")
    other = [row for row in theirs[1] if row["origin_tag"] == 1]
    drawn = random.Random(42).sample(other, round(0.4 * len(other)))
    kept = {row["content_hash"] for row in drawn if row["split"] == "train"}
    new = {row["content_hash"] for row in theirs[1] if not row["origin_tag"]}
    for split in ("train", "holdout"):
        store = BlockStore(tmp_path / "store", split)
        store.verify()
        rows = [row for row in theirs[1] if row["split"] == split]
        if split == "train":
            rows = [row for row in rows if row["content_hash"] in kept | new]
        rows.sort(key=lambda row: (row["origin_tag"], row["origin"]))
        expected = np.array([row["token_ids"] for row in rows])
        assert np.array_equal(store.tokens(np.arange(len(store))), expected)
    hashes = np.load(tmp_path / "store" / "content_hash.npy")
    assert len(hashes) == len(BlockStore(tmp_path / "store"))


def test_blocks_keep_their_order_and_holdout(theirs: Theirs, ours: Path) -> None:
    for split in ("train", "holdout"):
        store = BlockStore(ours, split)
        store.verify()
        rows = [row for row in theirs[1] if row["split"] == split]
        assert len(store) == len(rows)
        for source in store.sources:
            of_source = [row for row in rows if row["origin"] == source.name]
            actual = store.tokens(np.arange(source.start, source.start + source.count))
            assert np.array_equal(actual, [row["token_ids"] for row in of_source])
            assert {row["origin_tag"] for row in of_source} == {int(source.role == "replay")}


def launches(rows: list[dict], folder: Path) -> None:
    """A run of 7 steps in two launches: the second repeats step 4, and a kill cut step 5."""
    first = [row for step in range(1, 6) for row in trace_rows(rows, step, K, seed=1)]
    write_lines(folder / "exp_001" / "selected_samples.jsonl", first[:-2])
    second = [row for step in range(4, 8) for row in trace_rows(rows, step, K)]
    write_lines(folder / "exp_002" / "selected_samples.jsonl", second)
    with (folder / "exp_002" / "selected_samples.jsonl").open("a") as file:
        file.write('{"step": 8, "content')


def test_a_trace_of_two_launches_and_two_phases(theirs: Theirs, ours: Path, tmp_path: Path) -> None:
    rows, store = theirs[1], BlockStore(ours)
    launches(rows, tmp_path / "constant")
    anneal = [row for step in (1, 2) for row in trace_rows(rows, step, K, seed=2)]
    write_lines(tmp_path / "anneal" / "exp_001" / "selected_samples.jsonl", anneal)
    phases = (tmp_path / "constant", tmp_path / "anneal")
    here("import", "curriculum", *phases, tmp_path / "c.rod", f"blocks={ours}")
    expected = [trace_rows(rows, step, K, seed=int(step < 4)) for step in range(1, 8)]
    expected += [trace_rows(rows, step, K, seed=2) for step in (1, 2)]
    by_hash = {row["content_hash"]: row for row in rows}
    with Curriculum.open(tmp_path / "c.rod", read_only=True) as curriculum:
        verify(curriculum, store)
        assert [record.step for record in curriculum] == list(range(9))
        for record, step in zip(curriculum, expected, strict=True):
            tokens = [by_hash[row["content_hash"]]["token_ids"] for row in step]
            assert np.array_equal(store.tokens(record.trained_on), tokens)
            assert record.score.tolist() == [row["rho"] for row in step]
            assert record.loss.tolist() == [row["target_loss"] for row in step]
            assert record.threshold == step[-1]["rho"]
    back = tmp_path / "back.jsonl"
    words = ("curriculum", "export", tmp_path / "c.rod", back, "--format", "authors")
    here(*words, "--blocks", ours)
    exported = [json.loads(line) for line in back.read_text().splitlines()]
    flat = [row | {"step": n} for n, step in enumerate(expected, start=1) for row in step]
    assert exported == flat


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trace_of_two_launches_trains(theirs: Theirs, tmp_path: Path) -> None:
    """Step by step on the blocks that the last launch of each recorded."""
    run, recorded = tmp_path / "run", tmp_path / "theirs"
    done = nemo_rod("import", "blocks", theirs[0], run, "recipe=toy_synthetic")
    assert done.returncode == 0, done.stderr
    launches(theirs[1], tmp_path / "logs")
    words = ("import", "curriculum", tmp_path / "logs", recorded / "curriculum.rod")
    assert nemo_rod(*words, f"blocks={run / 'blocks'}").returncode == 0
    small = [
        f"{section}.{key}={value}"
        for section, steps in (("pretrain", 1), ("train", 7))
        for key, value in {"steps": steps, "batch_size": K, "micro_batch_size": K}.items()
    ]
    recipe = ("recipe=toy_synthetic", f"run_dir={run}", "parallel=single", *small)
    arm = f"+variants.transfer={{of:rod,curriculum:{recorded}}}"
    for words in (
        ("pretrain", *recipe),
        ("train", *recipe, arm, "arms=[transfer]", "arm=transfer"),
    ):
        done = nemo_rod(*words)
        assert done.returncode == 0, done.stderr
    with (
        Curriculum.open(recorded / "curriculum.rod", read_only=True) as imported,
        Curriculum.open(run / "arms" / "transfer" / "curriculum.rod", read_only=True) as trained,
    ):
        assert len(imported) == len(trained) == 7
        for one, other in zip(imported, trained, strict=True):
            assert np.array_equal(one.trained_on, other.trained_on)


def copied(folder: Path, out: Path, change: Callable[[int, pa.Table], pa.Table | None]) -> Path:
    """A copy of the parts of a corpus with some of them changed or left out."""
    out.mkdir()
    for number, part in enumerate(sorted(folder.glob("*.parquet"))):
        if (table := change(number, pq.read_table(part))) is not None:
            pq.write_table(table, out / part.name)
    return out


def changed(table: pa.Table, name: str, values: list) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(
        table.schema.get_field_index(name), field, [pa.array(values, field.type)]
    )


BLOCKS = {
    "a part is missing": (lambda n, t: None if n == 1 else t, "lacks part_00001.parquet"),
    "no part": (lambda n, t: None, "has no part_00000.parquet"),
    "another table": (lambda n, t: t.drop_columns("split"), "has no column 'split'"),
    "foreign hash": (lambda n, t: changed(t, "content_hash", ["ab" * 32] * len(t)) if n == 2 else t,
                     "of other tokens"),
    "no hash": (lambda n, t: changed(t, "content_hash", ["xyz"] * len(t)), "part_00000.parquet is"),
    "another split": (lambda n, t: changed(t, "split", ["test"] * len(t)), "split 'test'"),
    "both roles": (lambda n, t: changed(t, "origin_tag", [n % 2] * len(t)), "in both roles"),
    "other lengths": (
        lambda n, t: changed(t, "token_ids", [[1] * (8 + i % 2) for i in range(len(t))]),
        "of different lengths",
    ),
    "large id": (lambda n, t: changed(t, "token_ids", [[300] * 64] * len(t)) if n else t,
                 "has the token id 300"),
    "name": (lambda n, t: changed(t, "origin", ["../law"] * len(t)), "names a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_bad_blocks_are_refused(theirs: Theirs, case: str, tmp_path: Path) -> None:
    change, sentence = BLOCKS[case]
    folder = copied(theirs[0], tmp_path / "blocks", change)
    refused(sentence, "blocks", folder, tmp_path / "store", "tokenizer=byte", "check=1")


FOREIGN = {"content_hash": "00" * 32}
TRACES = {
    "gap": ([1, 2, 4], lambda rows: rows, "step 3 is missing"),
    "period of two": ([2, 4, 6], lambda rows: rows, "step 1 is missing"),
    "empty": ([], lambda rows: rows, "has no row of a selection trace"),
    "foreign": ([1, 2], lambda rows: [*rows[:3], rows[3] | FOREIGN, *rows[4:]],
                "not among the training blocks"),
    "sizes": ([1, 2], lambda rows: [*rows, rows[-1]], "step 2 has 6 blocks and step 1 has 5"),
    "not a trace": ([1, 2], lambda rows: [rows[0], {"text": "a"}, *rows[2:]],
                    "has no row of a selection trace at byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRACES)
def test_bad_traces_are_refused(theirs: Theirs, ours: Path, case: str, tmp_path: Path) -> None:
    steps, change, sentence = TRACES[case]
    rows = change([row for step in steps for row in trace_rows(theirs[1], step, K)])
    write_lines(tmp_path / "trace" / "exp_001" / "selected_samples.jsonl", rows)
    refused(sentence, "curriculum", tmp_path / "trace", tmp_path / "c", f"blocks={ours}")


def cache_rows(rows: list[dict], tag: int) -> list[dict]:
    """Losses of one role's training blocks, but for some that their last batch dropped."""
    dice = np.random.default_rng(tag)
    taken = [row for row in rows if row["split"] == "train" and row["origin_tag"] == tag][3:]
    return [
        {
            "content_hash": row["content_hash"], "origin": row["origin"], "origin_tag": tag,
            "ref_loss": float(np.float32(dice.gamma(2.0))), "n_response_tokens": 63,
        }
        for row in taken
    ]  # fmt: skip


def write_cache(folder: Path, rows: list[dict], *, per_file: int = 100) -> None:
    types = {"content_hash": pa.string(), "origin": pa.string(), "origin_tag": pa.int32()}
    schema = pa.schema(types | {"ref_loss": pa.float32(), "n_response_tokens": pa.int32()})
    folder.mkdir()
    for number, first in enumerate(range(0, len(rows), per_file)):
        table = pa.Table.from_pylist(rows[first : first + per_file], schema=schema)
        pq.write_table(table, folder / f"refloss_train_{number:012x}.parquet")


@pytest.mark.parametrize("role", ["adaptation", "replay"])
def test_references_are_theirs_to_the_bit(
    theirs: Theirs, ours: Path, role: str, tmp_path: Path
) -> None:
    both = cache_rows(theirs[1], 0) + cache_rows(theirs[1], 1)
    mine = [row for row in both if row["origin_tag"] == int(role == "replay")]
    np.random.default_rng(0).shuffle(both)
    write_cache(tmp_path / "cache", both + both[:5])  # a block may be there twice
    words = (f"blocks={ours}", f"role={role}", "model=specialist", "precision=bf16")
    here("import", "references", tmp_path / "cache", tmp_path / "out", *words)
    store, folder = BlockStore(ours), Folder.open(tmp_path / "out")
    ids = np.arange(folder.manifest.start, folder.manifest.stop)
    losses = folder.records(ids)["loss"][:, 0]
    by_hash = {row["content_hash"]: row["ref_loss"] for row in mine}
    names = [h.tobytes().hex() for h in np.load(ours / "content_hash.npy")[ids]]
    expected = [by_hash.get(name, np.nan) for name in names]
    assert np.array_equal(losses, np.array(expected, dtype=np.float32), equal_nan=True)
    assert np.isnan(losses).sum() == 3
    assert (folder.manifest.model, folder.manifest.store) == ("specialist", store.digest)


CACHES = {
    "two models": (lambda rows: [*rows, rows[5] | {"ref_loss": 9.5}], "of two models"),
    "two models, next row": (lambda rows: [rows[0], rows[0] | {"ref_loss": 9.5}, *rows[1:]],
                             "of two models"),
    "foreign": (lambda rows: [rows[0] | FOREIGN, *rows[1:]],
                "not among the training blocks"),
    "not finite": (lambda rows: [rows[0] | {"ref_loss": float("nan")}], "has the loss nan"),
    "other size": (lambda rows: [rows[0] | {"n_response_tokens": 4095}], "over 4095 targets"),
    "other role": (lambda rows: [row | {"origin_tag": 1} for row in rows], "no loss of the adapt"),
    "none": (lambda rows: [], "has no refloss_train_"),
}  # fmt: skip


@pytest.mark.parametrize("case", CACHES)
def test_bad_caches_are_refused(theirs: Theirs, ours: Path, case: str, tmp_path: Path) -> None:
    change, sentence = CACHES[case]
    write_cache(tmp_path / "cache", change(cache_rows(theirs[1], 0)))
    words = (f"blocks={ours}", "role=adaptation", "model=specialist", "precision=bf16")
    refused(sentence, "references", tmp_path / "cache", tmp_path / "out", *words)
