"""Killed, starved of disk or of workers: the next run goes on and ends in the same files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpus_cases import run, source, texts, tree, write
from mishaps import largest_file

from nemo_rod.corpus import SourceSpec, encode

# The beginning of both programs: `attempt` runs `prepare` in a child that kills itself at its n-th
# call of some functions of the file system, and returns the child's exit status.
ATTEMPTS = """
import os, random, shutil, signal, sys
from pathlib import Path
import numpy as np
import nemo_rod.corpus.encode as encode
from corpus_cases import make_corpus, run, source, texts, tree, write
from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.hashing import holdout_values
from nemo_rod.corpus.shards import index_bytes

folder = Path(sys.argv[1])
NAMES = ("rename", "replace", "unlink", "rmdir")

def attempt(root, sources, deadly, names=NAMES, **options):
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), "the run failed"
        return status
    os.fsync = lambda handle: None  # a process that dies loses nothing that it has written
    calls = 0
    def counted(real):
        def call(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)
        return call
    for name in names:
        setattr(os, name, counted(getattr(os, name)))
    try:
        run(root, sources, **options)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
"""
# At random calls again and again, until the run is through.
KILLED = """
encode.BATCH_BYTES = 4000
corpus, whole = make_corpus(folder / "data"), folder / "whole"
rows = np.random.default_rng(0).integers(1, 256, (500, 20), dtype=np.int32)
rows[:, -1] = 0  # ends of documents
rows.tofile(folder / "there.bin")
(folder / "there.idx").write_bytes(index_bytes(*rows.shape))
stays = {"files": [str(folder / "there")], "options": {"copy": False}}
corpus.append(SourceSpec(name="there", role="replay", kind="megatron", **stays))
attempt(whole, corpus, 0, checkpoint_seconds=1e9, blocks_per_shard=300)
expected, dice = tree(whole), random.Random(int(sys.argv[2]))
kills = 0
for turn in range(int(sys.argv[3])):
    root, names = folder / f"broken{turn}", ("fsync", *NAMES)
    while attempt(root, corpus, dice.randint(1, 120), names, checkpoint_seconds=0.0,
                  blocks_per_shard=300):
        kills += 1
        assert kills < 2000
    assert tree(root) == expected, f"turn {turn} differs"
print("kills", kills)
"""
# Before every n-th change to the names of files, also within the removal of a folder. A turn is the
# former content of the store, and the run.
REPLACED = """
def made(name, count, role):
    return source(name, [write(folder / (name + ".jsonl"), texts(count, count))], role=role)

new, more = made("new", 20, "adaptation"), made("more", 15, "adaptation")
large, small, other = (made(n, c, "replay") for n, c in (("large", 60), ("small", 30), ("o", 10)))
both = {"holdout_floor": 4, "replay_ratio": 1.0}
floor = {"holdout_fraction": 0.0, "holdout_floor": 4}
# documents of a block each: those that one source holds out are too many in the other, so that it
# holds out others once it has a neighbour
single = [f"{number:031d}" for number in range(30)]
rows = np.array([[*text.encode(), 0] for text in single], dtype=np.int32)
lowest = [single[place] for place in holdout_values(rows).argsort()[:4]]
one = source("one", [write(folder / "one.jsonl", single)])
often = [*lowest * 9, *(f"{number:031d}" for number in range(40, 44))]
beside = source("beside", [write(folder / "beside.jsonl", often)])
first, last = {
    "thinned": (None, ([new, large, small], both)),
    "again": (([new, large, other], both), ([new, more, large], both)),
    "raised": (([new, one], floor), ([new, one, beside], floor)),
    "otherwise": (([new, large], {"replay_ratio": 1.0}), ([new, large], both)),
}[sys.argv[2]]
start, whole, kills = folder / "start", folder / "whole", 0
start.mkdir()
if first:
    attempt(start, first[0], 0, **first[1])
attempt(whole, last[0], 0, **last[1])
expected = tree(whole)
while True:
    root = folder / f"broken{kills}"
    shutil.copytree(start, root)
    if not attempt(root, last[0], 1 + kills * int(sys.argv[3]), rebuild=True, **last[1]):
        break
    kills += 1
    assert not attempt(root, last[0], 0, rebuild=True, **last[1])
    assert tree(root) == expected, f"kill {kills}: the files differ"
    shutil.rmtree(root)
print("kills", kills)
"""
TURNS = ("thinned", "again", "raised", "otherwise")


@pytest.mark.parametrize(
    ("program", "arguments", "least"),
    [
        (KILLED, (0, 1), 3),
        pytest.param(KILLED, (1, 60), 20, marks=pytest.mark.slow),
        *((REPLACED, (turn, 11), 3) for turn in TURNS),
        *(pytest.param(REPLACED, (turn, 1), 40, marks=pytest.mark.slow) for turn in TURNS),
    ],
)
def test_killed_runs_end_in_the_same_files(tmp_path, program, arguments, least):
    command = [sys.executable, "-c", ATTEMPTS + program, str(tmp_path), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > least, done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


WITH_WORKERS = """
import sys
from pathlib import Path
import nemo_rod.corpus.encode as encode
from corpus_cases import make_corpus, run
if __name__ == "__main__":
    encode.BATCH_BYTES = 2000
    folder = Path(sys.argv[1])
    tell = lambda done, total, what: print(what, done, total, flush=True)
    run(folder / "killed", make_corpus(folder / "data"), workers=2, checkpoint_seconds=0.0,
        progress=tell)
"""


def test_workers_leave_with_a_parent_that_is_killed(tmp_path, shared):
    program = tmp_path / "program.py"
    program.write_text(WITH_WORKERS)
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(20):
        assert process.stdout.readline()
    process.kill()
    process.communicate(timeout=20)  # to its end: workers that still ran would hold it
    check_resumed(tmp_path / "killed", shared)


def check_resumed(unfinished: Path, shared: tuple[list[SourceSpec], Path]) -> None:
    """Resumes an unfinished run, and compares it with one in a single go."""
    run(unfinished, shared[0])
    assert tree(unfinished) == tree(shared[1])


def test_a_worker_that_is_killed_is_one_sentence_and_no_hang(tmp_path, shared, monkeypatch):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 2000)
    calls = 0

    def kill_a_worker(done: int, total: int | None, what: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            command = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
            os.kill(next(c for c in command if b"spawn_main" in command[c]), signal.SIGKILL)

    with pytest.raises(ValueError, match="a tokenising process was ended from outside"):
        run(tmp_path / "killed", shared[0], workers=2, progress=kill_a_worker, checkpoint_seconds=0)
    check_resumed(tmp_path / "killed", shared)


@pytest.mark.parametrize("limit", [700, 5_000, 60_000])
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, shared, monkeypatch, limit):
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 4000)
    with (
        pytest.raises(ValueError, match=rf"^no room left for the blocks in {tmp_path}/full \(.*$"),
        largest_file(limit),
    ):
        run(tmp_path / "full", shared[0], checkpoint_seconds=0)
    check_resumed(tmp_path / "full", shared)


def test_a_file_that_changes_in_the_middle_is_read_anew(tmp_path, monkeypatch):
    """Even if its size stays: what was read of it before is not kept."""
    monkeypatch.setattr(encode, "BATCH_BYTES", 1000)
    file = write(tmp_path / "a.jsonl", texts(200, 1))
    spec, options = source("web", [file]), {"checkpoint_seconds": 0.0}
    good = file.read_bytes()
    file.write_bytes(good[:-2] + b"x\n")  # the last line is cut off
    with pytest.raises(ValueError, match="not a line of JSON"):
        run(tmp_path / "blocks", [spec], **options)
    assert list((tmp_path / "blocks").rglob("state.json"))
    file.write_bytes(good.replace(b"a", b"b"))
    run(tmp_path / "blocks", [spec], **options)
    run(tmp_path / "anew", [spec], **options)
    assert tree(tmp_path / "blocks") == tree(tmp_path / "anew")

    real = encode.batches

    def touched(documents: Any) -> Any:
        yield from real(documents)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(encode, "batches", touched)
    with pytest.raises(ValueError, match=r"a\.jsonl was changed while it was read: run again"):
        run(tmp_path / "during", [spec], **options)
