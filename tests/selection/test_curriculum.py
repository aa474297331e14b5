"""The curriculum: what goes in comes out, after any crash; foreign ones are refused by name.

And the journal of a run, which records in it and in the metrics.
"""

import errno
import json
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings, stateful
from hypothesis import strategies as st
from mishaps import largest_file

from nemo_rod.lab import curriculum_tools
from nemo_rod.lab.curriculum_tools import diff, export, verify
from nemo_rod.selection.arms import make_arm
from nemo_rod.selection.candidates import Candidates, Pool
from nemo_rod.selection.choice import Choice
from nemo_rod.selection.curriculum.header import CurriculumHeader
from nemo_rod.selection.curriculum.journal import Journal
from nemo_rod.selection.curriculum.log import PADDING_ID, Curriculum
from nemo_rod.selection.curriculum.recorded_pools import FollowedPools, RecordedPools, replay_share
from nemo_rod.selection.policies import Joint, TakeAll

C, K = 12, 5  # not multiples of 8, for the bits of `chosen`
SIZE = 8 + 8 + C * (8 + 4 + 4) + 2 + 4  # bytes of a record with its checksum
SOURCES = (("law", "adaptation", 0, 30), ("news", "adaptation", 30, 10), ("web", "replay", 40, 60))
HEADER = CurriculumHeader(
    num_candidates=C, num_chosen=K, block_size=64, store="store-1", tokenizer="tokenizer-1",
    references="references-1", config="config-1", seed=42, sources=SOURCES,
)  # fmt: skip


@dataclass
class Store:
    digest: str = "store-1"
    tokenizer_fingerprint: str = "tokenizer-1"
    block_size: int = 64
    count: int = 100

    def __len__(self):
        return self.count


def step_of(step, seed=0):
    """A step as a run would have it."""
    ids = Candidates(num_adaptation=40, num_replay=60, batch_size=C // 2).pool(step).block_ids
    pool = Pool(step, ids, ids >= 40)
    rng = np.random.default_rng([step, seed])
    loss_C = rng.random(C).astype(np.float32)
    score_C = loss_C - rng.random(C).astype(np.float32)
    chosen = Joint().select(pool, score_C, K)
    return Choice(pool, loss_C, score_C, chosen, float(score_C[chosen].min()))


@cache
def row_of(step, seed=0):
    """A record as the head of `log.py` has it."""
    made = step_of(step, seed)
    values = (step, made.threshold, *made.pool.block_ids, *made.loss, *made.score)
    bits = sum(1 << place for place in made.chosen.tolist()).to_bytes(2, "little")
    data = struct.pack(f"<Qd{C}q{C}f{C}f", *values) + bits
    return data + zlib.crc32(data).to_bytes(4, "little")


def refused(sentence):
    return pytest.raises(ValueError, match=sentence)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.rod"


def record(path, steps, header=HEADER, seed=0):
    with Curriculum.create(path, header) as curriculum:
        for step in range(header.first_step, header.first_step + steps):
            curriculum.append(step_of(step, seed))
    return path.read_bytes()


def check(curriculum, steps, first=0, seeds=None):
    """Compare every value of a curriculum with what was recorded."""
    assert len(curriculum) == steps and curriculum.next_step == first + steps
    arrays = curriculum_tools.arrays(curriculum)
    for i, row in enumerate(curriculum):
        made = step_of(first + i, seeds[i] if seeds else 0)
        assert row.step == arrays.step[i] == first + i
        assert row.threshold == arrays.threshold[i] == made.threshold
        assert row.block_ids.dtype == np.int64 and row.chosen.dtype == np.int64
        for value, expected in (
            (row.block_ids, made.pool.block_ids),
            (row.loss, made.loss),
            (row.score, made.score),
            (row.chosen, made.chosen),
            (arrays.block_ids[i], made.pool.block_ids),
            (arrays.loss[i], made.loss),
            (arrays.score[i], made.score),
            (np.flatnonzero(arrays.chosen[i]), made.chosen),
        ):
            assert np.array_equal(value, expected)


FOREIGN = [
    *((name, "other") for name in ("store", "tokenizer", "references", "config", "score")),
    *(("seed", 43), ("num_chosen", 6), ("block_size", 128), ("scored", False)),
    ("sources", (*SOURCES[:2], ("web", "replay", 40, 61))),
]
STEPS = st.integers(-2, 9)  # from the first one on


class Recording(stateful.RuleBasedStateMachine):
    """A run that records, is killed, resumes and is read, beside the bytes that the file has."""

    folder = None  # of the test

    @stateful.initialize(first=st.sampled_from([0, 1000]))
    def begin(self, first):
        self.path, self.first, self.seeds = self.folder / "c.rod", first, []
        self.path.unlink(missing_ok=True)
        self.header = replace(HEADER, first_step=first)
        self.curriculum = Curriculum.create(self.path, self.header)
        self.head = self.path.read_bytes()

    def teardown(self):
        self.curriculum.close()

    @stateful.invariant()
    def the_file_is_what_it_should_be(self):
        rows = [row_of(self.first + i, seed) for i, seed in enumerate(self.seeds)]
        assert self.path.read_bytes() == self.head + b"".join(rows)
        with Curriculum.open(self.path, expect=self.header, read_only=True) as reader:
            assert reader.header == self.header
            assert [row.step for row in reader] == [self.first + i for i in range(len(rows))]
            with pytest.raises(IndexError):
                reader[len(rows)]

    @stateful.rule(seeds=st.lists(st.integers(0, 3), max_size=4))
    def append(self, seeds):
        for seed in seeds:
            self.curriculum.append(step_of(self.curriculum.next_step, seed))
        self.seeds += seeds

    @stateful.rule(step=STEPS)
    def append_out_of_order(self, step):
        assume(step not in (-1, -2) and step != len(self.seeds))
        sentence = f"expects step {self.curriculum.next_step} next, found step {self.first + step}:"
        with refused(sentence):
            self.curriculum.append(step_of(self.first + step))

    @stateful.rule(step=STEPS, opens=st.booleans())
    def go_on_at(self, step, opens):
        at = self.first + step

        def go_on():
            if opens:
                self.curriculum.close()
                self.curriculum = Curriculum.open(self.path, expect=self.header, resume_at=at)
            else:
                self.curriculum.truncate(at)

        if 0 <= step <= len(self.seeds):
            go_on()
            del self.seeds[step:]
        else:
            held = f"holds steps {self.first} to {self.first + len(self.seeds) - 1}"
            with refused(f"{held}, so a run cannot continue at step {at}: "):
                go_on()
            self.curriculum = Curriculum.open(self.path)

    @stateful.rule(
        size=st.integers(0, 3 * SIZE), end=st.sampled_from([b"", b"\0", b"\xff", b"torn"])
    )
    def die(self, size, end):
        """At any byte of the last records; what a crash leaves behind them is dropped."""
        self.curriculum.close()
        whole = len(self.head) + SIZE * len(self.seeds)
        left = max(len(self.head), whole - size)
        with self.path.open("r+b") as file:
            file.truncate(left)
            file.seek(left)
            file.write(end * (size if size % 2 else 2 * SIZE))
        del self.seeds[(left - len(self.head)) // SIZE :]
        before = self.path.read_bytes()
        with Curriculum.open(self.path, read_only=True) as reader:  # which changes nothing
            check(reader, len(self.seeds), self.first, self.seeds)
        assert self.path.read_bytes() == before
        self.curriculum = Curriculum.open(self.path)

    @stateful.rule(place=st.integers(0, 9 * SIZE), bit=st.integers(0, 7))
    def rot(self, place, bit):
        """What is no crash of a writer is refused, and dropped only by who asks for it."""
        step = place // SIZE
        assume(step < len(self.seeds) - 1)
        data = bytearray(self.path.read_bytes())
        data[len(self.head) + place] ^= 1 << bit
        self.path.write_bytes(data)
        sentence = rf"damaged record of step {self.first + step} \(checksum\) before whole ones"
        for options in ({}, {"read_only": True}, {"resume_at": self.first + len(self.seeds)}):
            with refused(sentence):
                Curriculum.open(self.path, **options)
        assert self.path.read_bytes() == data
        self.curriculum.close()
        self.curriculum = Curriculum.open(self.path, resume_at=self.first + step)
        del self.seeds[step:]

    @stateful.rule(change=st.sampled_from([*FOREIGN, ("first_step", 7)]))
    def resume_with_other_settings(self, change):
        name, value = change
        with refused(rf"c.rod was recorded with {name} .* \(this run: ") as error:
            Curriculum.open(self.path, expect=replace(self.header, **{name: value}), resume_at=0)
        others = {field for field, _ in FOREIGN} - {name}
        assert not any(f" {other} " in str(error.value) for other in others)

    @stateful.rule(seed=st.integers(0, 3))
    def run_beside_another(self, seed):
        with Curriculum.open(self.path) as other:
            other.append(step_of(other.next_step, seed))
            self.seeds.append(seed)
            with refused("another one writes to it: run one job per folder"):
                self.curriculum.append(step_of(self.curriculum.next_step))
        self.curriculum.close()
        self.curriculum = Curriculum.open(self.path)

    @stateful.rule(room=st.integers(0, SIZE - 1))
    def fill_the_disk(self, room):
        with (
            pytest.raises(OSError, match="make room"),
            largest_file(self.path.stat().st_size + room),
        ):
            self.curriculum.append(step_of(self.curriculum.next_step))


def test_a_run_records_whatever_befalls_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody takes the power off
    machine = type("Machine", (Recording,), {"folder": tmp_path})
    stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=20)
    )


def test_damage_to_the_header_is_noticed(path):
    """It is moved into place whole, so that this is no crash of ours."""
    whole = record(path, 0)
    cuts = [whole[:end] for end in range(len(whole))]
    flips = [
        bytes(b ^ (i == at) << at % 8 for i, b in enumerate(whole)) for at in range(len(whole))
    ]
    for data in (*cuts, *flips):
        path.write_bytes(data)
        with refused(r"damaged header|begins with|has a header of"):
            Curriculum.open(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist: check the path"),
        (b"Good morning, no log.", r"begins with b'Good mor', expected b'RODCUR01'"),
        (b"", "begins with b''"),
    ],
)
def test_files_that_are_no_curriculum(path, content, sentence):
    if content is not None:
        path.write_bytes(content)
        with refused("exists: open it to resume, or remove it"):
            Curriculum.create(path, HEADER)
        assert path.read_bytes() == content
    with refused(sentence):
        Curriculum.open(path)


@given(st.lists(st.floats(-50, 50, width=32), min_size=C, max_size=C), st.permutations(range(C)))
def test_any_scores_and_any_choice(tmp_path_factory, scores, order):
    path = tmp_path_factory.mktemp("c") / "c.rod"
    pool = Pool(0, np.arange(C) + (1 << 40), np.ones(C, bool))
    with Curriculum.create(path, HEADER) as curriculum:
        curriculum.append(Choice(pool, np.arange(C), scores, order[:K], -1e-300))
        row = curriculum[0]
    assert row.score.tolist() == scores and row.threshold == -1e-300
    assert row.chosen.tolist() == sorted(order[:K])
    assert np.array_equal(row.block_ids, pool.block_ids)


def test_what_is_refused_when_appending(path):
    good = step_of(0)
    bad = good.score.copy()
    bad[3] = np.nan
    wrong = [[*good.chosen[:-1]], [0, 0, 1, 2, 3], [0, 1, 2, 3, C], [-1, 0, 1, 2, 3]]
    with Curriculum.create(path, HEADER) as curriculum:
        for changes in (
            {"score": bad},
            {"threshold": math.nan},
            {"loss": None, "score": None},
            *({"chosen": np.array(chosen)} for chosen in wrong),
        ):
            with pytest.raises(AssertionError):
                curriculum.append(replace(good, **changes))
        assert len(curriculum) == 0


def test_arms_that_score_nothing(path):
    header = replace(HEADER, num_chosen=C, references="", scored=False)
    with Curriculum.create(path, header) as curriculum:
        for step in range(3):
            pool = step_of(step).pool
            curriculum.append(Choice(pool, None, None, TakeAll().select(pool, None, C)))
        row, columns = curriculum[1], exported(curriculum)
    assert np.isnan(row.loss).all() and np.isnan(row.score).all() and math.isnan(row.threshold)
    assert row.chosen.tolist() == list(range(C))
    for name in ("score", "loss", "reference", "threshold"):
        assert columns[name] == [None] * 36
    assert all(columns["chosen"])


def test_sources_of_block_ids():
    ids = [0, 29, 30, 39, 40, 99, PADDING_ID]
    assert HEADER.source_index(ids).tolist() == [0, 0, 1, 1, 2, 2, -1]
    assert HEADER.is_replay(ids).tolist() == [False] * 4 + [True] * 2 + [False]


# --- training on a recorded curriculum

FOREIGN_STORES = (
    (Store(digest="s2"), "with block store 'store-1', but the block store has 's2': use the store"),
    (Store(tokenizer_fingerprint="t2"), "with tokenizer 'tokenizer-1', but the block store has"),
    (Store(block_size=128), "with block size 64, but the block store has 128"),
    # another tokenizer makes another store: the cause is named
    (Store(digest="s2", tokenizer_fingerprint="t2"), "with tokenizer 'tokenizer-1'"),
)


@pytest.mark.parametrize("use", [RecordedPools, verify])
@pytest.mark.parametrize(("store", "sentence"), FOREIGN_STORES)
def test_a_recorded_curriculum_refuses_another_tokenizer_or_store(path, use, store, sentence):
    record(path, 1)
    with (
        Curriculum.open(path, read_only=True) as curriculum,
        refused(f"c.rod was recorded {sentence}"),
    ):
        use(curriculum, store)


def test_training_on_a_recorded_curriculum(path):
    record(path, 4)
    with Curriculum.open(path, read_only=True) as curriculum:
        pools = RecordedPools(curriculum, Store())
        assert pools.size == K
        for step in (3, 0):
            pool, chosen = step_of(step).pool, step_of(step).chosen
            recorded = pools.pool(step)
            assert recorded.step == step
            assert np.array_equal(recorded.block_ids, pool.block_ids[chosen])
            assert np.array_equal(recorded.is_replay_C, pool.is_replay_C[chosen])
            assert TakeAll().select(recorded, None, K).tolist() == list(range(K))
        with refused("holds steps 0 to 3, but step 4 is needed: set"):
            pools.pool(4)


ROD = make_arm(
    "rod", num_adaptation=40, num_replay=60, batch_size=8, multiplier=2, balance="expected",
    kappa=1.0, seed=3,
)  # fmt: skip


@pytest.fixture
def recorded(path):
    """RoD with random scores, so that it replays now more and now less."""
    curriculum = Curriculum.create(path, replace(HEADER, num_candidates=16, num_chosen=8))
    random = np.random.default_rng(0)
    for step in range(9):
        pool = ROD.pools().pool(step)
        score = random.random(16).astype(np.float32)
        chosen = Joint().select(pool, score, 8)
        curriculum.append(Choice(pool, score, score, chosen, float(score[chosen].min())))
    return curriculum


def source_of(block_id):
    return next(name for name, _, start, count in SOURCES if start <= block_id < start + count)


def role_of(block_id):
    return "replay" if block_id >= 40 else "adaptation"


@pytest.mark.parametrize(("by", "group"), [("role", role_of), ("source", source_of)])
def test_the_first_blocks_of_each_group_as_many_as_recorded(recorded, by, group):
    pools = FollowedPools(ROD.pools(), recorded, by=by, store=Store())
    assert pools.size == 8
    for row in recorded:
        left = [group(block) for block in row.trained_on]
        expected = []
        for block in ROD.pools().pool(row.step).block_ids:  # one by one, while some are wanted
            if group(block) in left:
                left.remove(group(block))
                expected.append(block)
        pool = pools.pool(row.step)
        assert pool.block_ids.tolist() == expected
        assert pool.is_replay_C.tolist() == [role_of(block) == "replay" for block in expected]


def test_other_pools_that_hold_too_few_are_refused(recorded):
    all_new = replace(ROD, balance="corpus", retention=0.0, kappa=None)
    with refused("blocks of replay, but the pool to draw from holds 0"):
        FollowedPools(all_new.pools(), recorded, by="role").pool(0)
    with refused("holds steps 0 to 8, but step 9 is needed"):
        FollowedPools(ROD.pools(), recorded, by="role").pool(9)


def test_mean_share_counts_every_block(recorded):
    trained = [block for row in recorded for block in row.block_ids[row.chosen]]
    assert replay_share(recorded) == sum(block >= 40 for block in trained) / len(trained)


# --- export, verify, diff


def exported(curriculum):
    """The columns of its file of parquet, the only one in a folder of its own."""
    parquet, file = pytest.importorskip("pyarrow.parquet"), curriculum.path.parent / "new/c.parquet"
    export(curriculum, file)
    assert [*file.parent.iterdir()] == [file]
    return parquet.read_table(file).to_pydict()


def test_export(path, monkeypatch):
    monkeypatch.setattr("nemo_rod.lab.curriculum_tools._EXPORT_ROWS", 2 * C)  # 3 row groups
    record(path, 5)
    with Curriculum.open(path, read_only=True) as curriculum:
        columns = exported(curriculum)
    names = "step position block_id role source score loss reference chosen threshold"
    assert list(columns) == names.split()
    assert columns["step"] == [step for step in range(5) for _ in range(C)]
    assert columns["position"] == list(range(C)) * 5
    for step in range(5):
        made = step_of(step)
        rows = {name: values[step * C : (step + 1) * C] for name, values in columns.items()}
        assert rows["block_id"] == made.pool.block_ids.tolist()
        assert rows["role"] == [role_of(block) for block in made.pool.block_ids]
        assert rows["source"] == [source_of(block) for block in made.pool.block_ids]
        assert rows["score"] == made.score.tolist() and rows["loss"] == made.loss.tolist()
        assert rows["reference"] == (made.loss - made.score).tolist()
        assert rows["chosen"] == [i in made.chosen for i in range(C)]
        assert rows["threshold"] == [made.threshold] * C


def test_only_a_difference_of_losses_gives_the_reference(tmp_path):
    other = replace(HEADER, score="relative")
    assert b'"score"' not in record(tmp_path / "c.rod", 0)
    assert b'"score": "relative"' in record(tmp_path / "other.rod", 2, other)
    with Curriculum.open(tmp_path / "other.rod", expect=other, read_only=True) as curriculum:
        columns = exported(curriculum)
    assert columns["reference"] == [None] * 2 * C and None not in columns["loss"]


def test_an_export_that_fails_leaves_no_file(path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", fail)
    record(path, 5)
    with (
        Curriculum.open(path, read_only=True) as curriculum,
        pytest.raises(OSError, match="No space left"),
    ):
        exported(curriculum)
    assert not any((path.parent / "new").iterdir())


def test_export_of_padding_and_of_nothing(path):
    choice = replace(step_of(0), chosen=np.arange(K))
    ids, loss, score = (
        np.append(values[:-1], last).astype(values.dtype)
        for values, last in (
            *((choice.pool.block_ids, PADDING_ID), (choice.loss, 1.0), (choice.score, -np.inf)),
        )
    )
    choice = replace(choice, pool=replace(choice.pool, block_ids=ids), loss=loss, score=score)
    with Curriculum.create(path, HEADER) as curriculum:
        assert exported(curriculum)["step"] == []
        curriculum.append(choice)
        verify(curriculum, Store())
        columns = {name: values[-1] for name, values in exported(curriculum).items()}
    assert (columns["block_id"], columns["score"]) == (PADDING_ID, -math.inf)
    assert [columns[n] for n in ("role", "source", "reference")] == [None] * 3


def test_verify(tmp_path, path):
    record(path, 3)
    with Curriculum.open(path, read_only=True) as curriculum:
        verify(curriculum, Store())
        with refused(r"step 0: block \d+ is not in the store of 50 blocks"):
            verify(curriculum, Store(count=50))
    choice = replace(step_of(0), chosen=np.arange(K))
    ids = np.append(PADDING_ID, choice.pool.block_ids[1:])
    choice = replace(choice, pool=replace(choice.pool, block_ids=ids))
    with Curriculum.create(tmp_path / "padding.rod", HEADER) as curriculum:
        curriculum.append(choice)
        with refused("expected 5 and no padding"):
            verify(curriculum, Store())


def test_diff(tmp_path):
    def opened(name, steps, header=HEADER, seed=0):
        record(tmp_path / name, steps, header, seed)
        return Curriculum.open(tmp_path / name, read_only=True)

    a, b = opened("a.rod", 6), opened("b.rod", 4, seed=1)
    late = opened("late.rod", 3, replace(HEADER, first_step=4))
    same = diff(a, a)
    assert same.overlap.tolist() == [1.0] * 6 and same.same_pools.all()
    assert np.array_equal(same.replay_share_a, same.replay_share_b)
    other = diff(a, b)
    assert other.step.tolist() == [0, 1, 2, 3] and other.same_pools.all()
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        ids_x, ids_y = (set(row.block_ids[row.chosen].tolist()) for row in (x, y))
        assert other.overlap[i] == len(ids_x & ids_y) / max(len(ids_x), len(ids_y))
        assert other.replay_share_a[i] == np.mean([j >= 40 for j in x.block_ids[x.chosen]])
        assert other.replay_share_b[i] == np.mean([j >= 40 for j in y.block_ids[y.chosen]])
    assert diff(a, late).step.tolist() == [4, 5] and diff(a, late).overlap.tolist() == [1.0, 1.0]
    with refused("have no step in common"):
        diff(b, late)
    with refused(r"is of block store 'store-1' and .* of 'store-2'"):
        diff(a, opened("foreign.rod", 4, replace(HEADER, store="store-2")))


# an update of 3 s, and 2 s of scoring before it: 5/3 of a plain step
SECONDS = {"timing/train/total": 5.0, "timing/train/update": 3.0}


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, HEADER, step=0)


@pytest.fixture
def on_fsync(tmp_path, monkeypatch):
    """Sets a function of the path that is called before every fsync within the folder."""
    fsync = os.fsync

    def install(before: Callable[[Path], None]) -> None:
        def patched(fd: int) -> None:
            path = Path(os.path.realpath(f"/proc/self/fd/{fd}"))
            if path.is_relative_to(tmp_path):
                before(path)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", patched)

    return install


# --- the journal: what a run writes down after every step, and what choosing added to it


def test_a_full_disk_is_named_by_the_file_of_metrics(tmp_path, journal):
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"make room and run it again.*metrics\.jsonl"):
        journal.append(0, step_of(0), SECONDS)


def test_overhead_is_what_choosing_adds_to_an_update(tmp_path, journal):
    made = step_of(0)
    row = journal.append(0, made, SECONDS)
    assert row["rod/overhead"] == pytest.approx(2 / 3)
    assert row["rod/share/web"] == made.pool.is_replay_C[made.chosen].mean()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == row
    (record,) = Curriculum.open(tmp_path / "curriculum.rod", read_only=True)
    assert record.chosen.tolist() == made.chosen.tolist()


def test_the_disk_has_a_step_when_it_ends_and_is_not_waited_for_before(tmp_path, journal, on_fsync):
    training, synced = threading.Event(), []

    def slow_disk(path: Path) -> None:
        assert training.wait(60)
        synced.append(path)

    on_fsync(slow_disk)
    for step in (0, 1):
        training.clear()
        journal.begin(step_of(step))  # returns although the disk is not done
        assert len(synced) == 3 * step
        with Curriculum.open(tmp_path / "curriculum.rod", read_only=True) as recorded:
            assert [record.step for record in recorded] == list(range(step + 1))
        training.set()
        journal.append(step, step_of(step), SECONDS)
        journal._disk.submit(int).result()  # after all that was begun
        files = [tmp_path / name for name in ("curriculum.rod", "metrics.jsonl", "")]
        assert synced == files * (step + 1)


def test_metrics_are_on_their_way_to_the_disk_when_a_step_ends(tmp_path, journal, on_fsync):
    begun, saved = threading.Event(), threading.Event()

    def slow_disk(path: Path) -> None:
        if path.name == "metrics.jsonl":
            begun.set()
            assert saved.wait(60)

    on_fsync(slow_disk)
    journal.append(0, step_of(0), SECONDS)  # returns although the disk is not done
    assert begun.wait(60)  # without waiting for another step
    journal.begin(step_of(1))
    saved.set()
    journal.append(1, step_of(1), SECONDS)


def test_a_resume_without_its_curriculum_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"curriculum.rod is missing, .* run has come to step 5"):
        Journal(tmp_path, HEADER, step=5)


@pytest.mark.parametrize(("name", "steps"), [("curriculum.rod", [0]), ("metrics.jsonl", [0, 1])])
def test_a_full_disk_ends_the_step_or_after_metrics_the_next(
    tmp_path, journal, on_fsync, name, steps
):
    def full_disk(path: Path) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    on_fsync(full_disk)
    *fine, last = steps
    for step in fine:
        journal.append(step, step_of(step), SECONDS)
    journal.begin(step_of(last))
    with pytest.raises(OSError, match=rf"No space left .* make room .*{name}"):
        journal.append(last, step_of(last), SECONDS)
    # the metrics do not claim that the step has ended
    file = tmp_path / "metrics.jsonl"
    assert len(file.read_text().splitlines() if file.exists() else []) == len(fine)
