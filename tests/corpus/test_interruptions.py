"""Killed, starved of disk or of workers: the next run goes on and ends in the same files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_cases import make_corpus, run, tree

# A process that ends itself, as by SIGKILL, at its n-th step that makes something last.
KILLED = """
import os, random, signal, sys
from pathlib import Path
import nemo_rod.corpus.encode as encode
from corpus_cases import make_corpus, run, tree
encode.BATCH_BYTES = 4000
folder = Path(sys.argv[1])
corpus = make_corpus(folder / "data")
steps = 0

def count_steps(deadly):
    def counted(real):
        def call(*arguments, **more):
            global steps
            steps += 1
            if steps == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)
        return call
    os.fsync = counted(os.fsync)
    for name in ("replace", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("rename", "replace", "unlink", "rmdir"):
        setattr(Path, name, counted(getattr(Path, name)))

def attempt(root, deadly, seconds):
    child = os.fork()
    if child == 0:
        try:
            count_steps(deadly)
            run(root, corpus, checkpoint_seconds=seconds, blocks_per_shard=300)
            os._exit(0)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WIFEXITED(status)

whole = folder / "whole"
assert attempt(whole, 0, 1e9)
expected = tree(whole)
dice = random.Random(int(sys.argv[2]))
kills = 0
for turn in range(int(sys.argv[3])):
    root = folder / f"broken{turn}"
    while not attempt(root, dice.randint(1, 120), 0.0):
        kills += 1
        assert kills < 2000
    assert tree(root) == expected, f"turn {turn} differs"
print("kills", kills)
"""


@pytest.mark.parametrize(("seed", "turns"), [(0, 6), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_files(
    tmp_path: Path, seed: int, turns: int
) -> None:
    done = python(KILLED, str(tmp_path), str(seed), str(turns))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 20, done.stdout


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=100,
    )


# A process that ends itself, as by SIGKILL, before its n-th change to the names of files, for every
# n in turn, also within the removal of a folder. A turn is what the store held before, and the run.
REPLACED = """
import os, shutil, sys
from pathlib import Path
import numpy as np
from corpus_cases import run, source, texts, tree, write
from nemo_rod.corpus.hashing import holdout_values

folder = Path(sys.argv[1])
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
turns = {
    "thinned": (None, ([new, large, small], both)),
    "again": (([new, large, other], both), ([new, more, large], both)),
    "raised": (([new, one], floor), ([new, one, beside], floor)),
    "otherwise": (([new, large], {"replay_ratio": 1.0}), ([new, large], both)),
}

def attempt(root, sources, options, deadly):
    child = os.fork()
    if child == 0:
        steps = 0
        def counted(real):
            def call(*arguments, **more):
                nonlocal steps
                steps += 1
                if steps == deadly:
                    os._exit(9)
                return real(*arguments, **more)
            return call
        for name in ("rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            run(root, sources, rebuild=True, **options)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

first, last = turns[sys.argv[2]]
start, whole, kills = folder / "start", folder / "whole", 0
start.mkdir()
if first:
    assert attempt(start, *first, 0) == 0
assert attempt(whole, *last, 0) == 0
expected = tree(whole)
while True:
    root = folder / f"broken{kills}"
    shutil.copytree(start, root)
    status = attempt(root, *last, kills + 1)
    if status == 0:
        break
    assert status == 9, f"kill {kills + 1}: the run failed"
    kills += 1
    assert attempt(root, *last, 0) == 0, f"kill {kills}: the next run failed"
    assert tree(root) == expected, f"kill {kills}: the files differ"
    shutil.rmtree(root)
print("kills", kills)
"""


@pytest.mark.parametrize("turn", ["thinned", "again", "raised", "otherwise"])
def test_a_kill_at_any_rename_or_removal_changes_nothing(tmp_path: Path, turn: str) -> None:
    done = python(REPLACED, str(tmp_path), turn)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 40, done.stdout


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


def test_workers_leave_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITH_WORKERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(20):
        assert process.stdout.readline()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while _alive(process.pid):
        assert time.monotonic() < deadline, "workers outlive the process that started them"
        time.sleep(0.05)
    corpus = make_corpus(tmp_path / "data")
    run(tmp_path / "killed", corpus)
    run(tmp_path / "whole", corpus)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def _alive(session: int) -> bool:
    """Whether a process of that session is left (one that has ended but is not reaped is not)."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


def test_a_worker_that_is_killed_is_one_sentence_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path / "data")
    monkeypatch.setattr("nemo_rod.corpus.encode.BATCH_BYTES", 2000)
    calls = 0

    def kill_a_worker(done: int, total: int | None, what: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            workers = [int(c) for c in children if b"spawn_main" in _command(int(c))]
            os.kill(workers[0], signal.SIGKILL)

    with pytest.raises(ValueError, match="a tokenising process was ended from outside"):
        run(tmp_path / "killed", corpus, workers=2, progress=kill_a_worker, checkpoint_seconds=0)
    run(tmp_path / "killed", corpus)
    run(tmp_path / "whole", corpus)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def _command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


FULL_DISK = """
import resource, sys
from pathlib import Path
import nemo_rod.corpus.encode as encode
from corpus_cases import make_corpus, run
encode.BATCH_BYTES = 4000
folder = Path(sys.argv[1])
corpus = make_corpus(folder / "data")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    run(folder / "full", corpus, checkpoint_seconds=0.0)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [700, 5_000, 60_000])
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, limit: int) -> None:
    done = python(FULL_DISK, str(tmp_path), str(limit))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"no room left for the blocks in {tmp_path / 'full'} (")
    assert done.stdout.count("\n") == 1
    corpus = make_corpus(tmp_path / "data")
    run(tmp_path / "full", corpus)
    run(tmp_path / "whole", corpus)
    assert tree(tmp_path / "full") == tree(tmp_path / "whole")
