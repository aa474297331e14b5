"""Blocks and traces of the authors' code: imported to the bit, written back, or refused."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import authors_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from authors_files import cache_rows, trace_rows, write_blocks, write_cache, write_lines
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


LAUNCHES = {  # steps and seed of each launch by its folder, how rows are written -> what counts
    "rows of steps in turn": ({"e_1": (range(1, 5), 0)},
                              lambda steps: [step[place] for place in range(K) for step in steps],
                              [(range(1, 5), 0)]),
    "9 before 10": ({"e_10": (range(3, 6), 1), "e_9": (range(1, 5), 0)}, None,
                    [(range(1, 3), 0), (range(3, 6), 1)]),
    "from zero": ({"e_1": (range(4), 0), "e_2": (range(2, 6), 1)}, None,
                  [(range(2), 0), (range(2, 6), 1)]),
    "a launch that ended early": ({"e_1": (range(1, 7), 0), "e_2": (range(4, 5), 1)}, None,
                                  [(range(1, 4), 0), (range(4, 5), 1)]),
    "a launch that was killed": ({"e_1": (range(1, 7), 0), "e_2": (range(4, 6), 1)},
                                 lambda steps: [r for s in steps for r in s][: 2 * K - 1],
                                 None),
    "tags of nobody": ({"e_1": (range(1, 3), 0)},
                       lambda steps: [r | {"origin_tag": "?"} for s in steps for r in s],
                       [(range(1, 3), 0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", LAUNCHES)
def test_steps_count_as_their_last_launch_has_them(
    theirs: Theirs, ours: Path, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, change, counted = LAUNCHES[case]

    def steps(numbers: range, seed: int) -> list[list[dict]]:
        return [trace_rows(theirs[1], number, K, seed) for number in numbers]

    for name, (numbers, seed) in files.items():
        rows = [row for step in steps(numbers, seed) for row in step]
        if change is not None and (name == "e_2" or len(files) == 1):
            rows = change(steps(numbers, seed))
        write_lines(tmp_path / "t" / name / "selected_samples.jsonl", rows)
    if counted is None:  # of the second launch, one step is whole
        counted = [(range(1, 4), 0), (range(4, 5), 1)]
    here("import", "curriculum", tmp_path / "t", tmp_path / "c.rod", f"blocks={ours}")
    expected = [step for numbers, seed in counted for step in steps(numbers, seed)]
    said = "t has records up to step 6: those after step 4 do not count"
    assert (said in capsys.readouterr().err) == ("launch" in case)
    with Curriculum.open(tmp_path / "c.rod", read_only=True) as curriculum:
        assert [r.score.tolist() for r in curriculum] == [[r["rho"] for r in s] for s in expected]
        is_replay = BlockStore(ours).is_replay
        for record, step in zip(curriculum, expected, strict=True):
            tags = [row["origin_tag"] for row in step]
            assert is_replay(record.trained_on).tolist() == tags


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
        if isinstance(table := change(number, pq.read_table(part)), bytes):
            (out / part.name).write_bytes(table)
        elif table is not None:
            pq.write_table(table, out / part.name)
    return out


def changed(table: pa.Table, name: str, values: list) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(
        table.schema.get_field_index(name), field, [pa.array(values, field.type)]
    )


def one(table: pa.Table, name: str, value: Any, row: int = 7, kind: Any = None) -> pa.Table:
    """A table with another value in one row, and another type of the column, perhaps."""
    values = table[name].cast(kind or table.schema.field(name).type).to_pylist()
    values[row] = value
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(values, kind or table.schema.field(name).type))


def block(table: pa.Table, row: int) -> pa.Table:
    """A table in which one row is of certain tokens."""
    ids = [*range(64)]
    name = authors_files.content_hash(table["origin"][row].as_py(), ids)
    return one(one(table, "token_ids", ids, row), "content_hash", name, row)


BLOCKS = {
    "a part is missing": (lambda n, t: None if n == 1 else t, "lacks part_00001.parquet"),
    "no part": (lambda n, t: None, "has no part_00000.parquet"),
    "a part under another name": (lambda n, t: t, "part_00001_old.parquet is none of the parts"),
    "a part of two numbers": (lambda n, t: t, "part_1.parquet is none of the parts"),
    "negative id": (lambda n, t: one(t, "token_ids", [-1] * 64), "has token ids from -1 to 255"),
    "another table": (lambda n, t: t.drop_columns("split"), "has no column 'split'"),
    "foreign hash": (lambda n, t: one(t, "content_hash", "ab" * 32) if n == 2 else t,
                     "blocks: row 348, of origin"),
    "other tokens": (lambda n, t: one(t, "token_ids", [7] * 64) if n == 2 else t,
                     "blocks: row 348, of origin"),
    "no hash": (lambda n, t: one(t, "content_hash", "xyz") if n == 1 else t,
                "part_00001.parquet, row 8: content_hash is 'xyz', expected 64 hexadecimal digits"),
    "half a tag": (lambda n, t: one(t, "origin_tag", 0.5, kind=pa.float64()),
                   "row 8: origin_tag is 0.5, expected a whole number"),
    "null origin": (lambda n, t: one(t, "origin", None), "row 8: origin is None, expected a text"),
    "null token": (lambda n, t: one(t, "token_ids", [1] * 63 + [None]), "or null among them"),
    "twice": (lambda n, t: pa.concat_tables([t, t.slice(3, 1)]) if n == 0 else t,
              "has 607 rows of 606 different blocks, by their content_hash: row 171 is"),
    "in both splits": (
        lambda n, t: pa.concat_tables([t, one(t.slice(0, 1), "split", "holdout", 0)][: 1 + n // 3]),
        "of 606 different blocks, by their content_hash: row 607 is"),
    "two origins, both splits": (lambda n, t: block(t, n and len(t) - 1) if n in (0, 3) else t,
                                 "has 1 training blocks that another origin holds out"),
    "LFS": (lambda n, t: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n",
            "part_00000.parquet is not the data, but a pointer of Git LFS: run git lfs pull"),
    "another split": (lambda n, t: changed(t, "split", ["test"] * len(t)), "split 'test'"),
    "both roles": (lambda n, t: changed(t, "origin_tag", [n % 2] * len(t)), "in both roles"),
    "other lengths": (
        lambda n, t: changed(t, "token_ids", [[1] * (8 + i % 2) for i in range(len(t))]),
        "has blocks of 8 to 9 tokens, or null among them: expected one length",
    ),
    "large id": (lambda n, t: changed(t, "token_ids", [[300] * 64] * len(t)) if n else t,
                 "has the token id 300"),
    "name": (lambda n, t: changed(t, "origin", ["../law"] * len(t)), "names a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_bad_blocks_are_refused(theirs: Theirs, case: str, tmp_path: Path) -> None:
    change, sentence = BLOCKS[case]
    folder = copied(theirs[0], tmp_path / "blocks", change)
    if named := re.match(r"part_\d+\w*\.parquet(?= is none)", sentence):
        shutil.copyfile(folder / "part_00001.parquet", folder / named[0])
    words = ("blocks", folder, tmp_path / "store", "tokenizer=byte")
    refused(sentence, *words)
    if "repeated=keep" in sentence or "twice" in case or "both splits" in case:
        here("import", *words, "repeated=keep")
        stores = [BlockStore(tmp_path / "store", split) for split in ("train", "holdout")]
        assert sum(map(len, stores)) == 606 + ("two origins" not in case)


FOREIGN = {"content_hash": "00" * 32}
TWICE = "has steps or blocks of one twice: split it where a launch begins"
TRACES = {
    "gap": ([1, 2, 4], lambda rows: rows, "step 3 is missing"),
    "period of two": ([2, 4, 6], lambda rows: rows, "step 1 is missing"),
    "empty": ([], lambda rows: rows, "has no row of a selection trace"),
    "foreign": ([1, 2], lambda rows: [*rows[:3], rows[3] | FOREIGN, *rows[4:]],
                "not among the training blocks"),
    "sizes": ([1, 2], lambda rows: [*rows, rows[-1]], "step 2 has 6 blocks and step 1 has 5"),
    "not a trace": ([1, 2], lambda rows: [rows[0], {"text": "a"}, *rows[2:]],
                    "selected_samples.jsonl, row 2: step is 'missing', expected a whole number"),
    "a list": ([1, 2], lambda rows: [[1], *rows], "row 1: step is 'missing'"),
    "two launches in a file": ([1, 2], lambda rows: [*rows, *rows], TWICE),
    "two writers of each row": ([1, 2], lambda rows: [r for one in rows for r in (one, one)],
                                TWICE),
    "another launch in a file": ([1, 2, 3], lambda rows: [
        *rows, *(row | {"content_hash": other["content_hash"]}
                 for row, other in zip(rows, [*rows[5:], *rows[:5]], strict=True))], TWICE),
    "a shorter launch first": ([1, 2, 3], lambda rows: [
        *(row | {"content_hash": other["content_hash"]}
          for row, other in zip(rows[:10], rows[5:], strict=True)), *rows], TWICE),
    "the scores of some": ([1, 2], lambda rows: [*rows[:8], rows[8] | {"rho": None}, rows[9]],
                           "steps 2 and 1 differ in whether all rows have rho and target_loss"),
    **{
        f"{key} {value!r}": ([1, 2], lambda rows, k=key, v=value: [rows[0] | {k: v}, *rows[1:]],
                             f"row 1: {key} is {value!r:.20}")
        for key, value in [
            ("step", None), ("step", "1"), ("step", 1.5), ("step", True), ("step", -1),
            ("content_hash", None), ("content_hash", "ab" * 16), ("content_hash", 7),
            ("content_hash", "é" * 64), ("rho", "high"), ("rho", math.nan), ("rho", 1e300),
            ("rho", True), ("target_loss", []), ("target_loss", -math.inf),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TRACES)
def test_bad_traces_are_refused(theirs: Theirs, ours: Path, case: str, tmp_path: Path) -> None:
    steps, change, sentence = TRACES[case]
    rows = change([row for step in steps for row in trace_rows(theirs[1], step, K)])
    write_lines(tmp_path / "trace" / "exp_001" / "selected_samples.jsonl", rows)
    refused(sentence, "curriculum", tmp_path / "trace", tmp_path / "c", f"blocks={ours}")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("e_1/.cache/s.jsonl", ""),
        ("e_1/t.jsonl", "s.jsonl and t.jsonl beside it both begin with step 1: a launch has one"),
        ("e_2/s.jsonl.gz", "e_2/s.jsonl.gz is compressed: unpack it"),
    ],
)
def test_files_beside_a_launch(
    theirs: Theirs, ours: Path, name: str, sentence: str, tmp_path: Path
) -> None:
    first, other = (
        [r for n in (1, 2) for r in trace_rows(theirs[1], n, K, seed)] for seed in (0, 1)
    )
    write_lines(tmp_path / "t" / "e_1" / "s.jsonl", first)
    with (tmp_path / "t" / "e_1" / "s.jsonl").open("a") as file:
        file.write("\n\n")
    write_lines(tmp_path / "t" / name, other)
    words = ("curriculum", tmp_path / "t", tmp_path / "c.rod", f"blocks={ours}")
    if sentence:
        return refused(sentence, *words)
    here("import", *words)
    with Curriculum.open(tmp_path / "c.rod", read_only=True) as curriculum:
        assert [score for r in curriculum for score in r.score] == [row["rho"] for row in first]


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
    "null tag": (lambda rows: [rows[0] | {"origin_tag": None}],
                 "row 1: origin_tag is None, expected a whole number"),
    "short hash": (lambda rows: [rows[0], rows[1] | {"content_hash": "ab"}],
                   "row 2: content_hash is 'ab', expected 64 hexadecimal digits"),
    "negative": (lambda rows: [rows[0] | {"ref_loss": -2.0}], "has the loss -2.0"),
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
