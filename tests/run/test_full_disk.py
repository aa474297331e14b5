"""A disk that is really full, a small tmpfs: named in one sentence, and nothing written is lost.

The programs run in a mount namespace of their own, which ends with them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, TESTS

# As root a namespace for mounts is enough; elsewhere a user namespace makes one root inside it.
PATH = (ROOT, TESTS / "helpers", TESTS / "selection")
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "-r", "--mount"]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="may not mount a tmpfs here")


def on_a_small_disk(program: str, folder: Path, kib: int) -> str:
    """Runs a Python program with a tmpfs of `kib` KiB mounted on `folder`; returns what it says.

    The program gets `disk`, and `make_room()`, which enlarges the tmpfs.
    """
    folder.mkdir()
    prelude = f"""
import subprocess
from pathlib import Path
disk = Path({str(folder)!r})
def make_room():
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
"""
    mount = f"mount -t tmpfs -o size={kib}k none '{folder}' && exec \"$@\""
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", mount, "sh", sys.executable, "-c", prelude + program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATH))},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PREPARE = """
from corpus_cases import make_corpus, run, tree
import nemo_rod.corpus.encode as encode
import tempfile
encode.BATCH_BYTES = 4000
made = tempfile.TemporaryDirectory()
elsewhere = Path(made.name)
corpus = make_corpus(elsewhere / "data")
run(elsewhere / "whole", corpus)
try:
    run(disk / "blocks", corpus, checkpoint_seconds=0.0)
except ValueError as error:
    print(error)
make_room()
run(disk / "blocks", corpus)
assert tree(disk / "blocks") == tree(elsewhere / "whole")
"""


@pytest.mark.parametrize("kib", [16, 150, 400])
def test_prepare(tmp_path, kib):
    message = on_a_small_disk(PREPARE, tmp_path / "disk", kib)
    assert message.startswith(
        f"no room left for the blocks in {tmp_path / 'disk' / 'blocks'} (No sp"
    )
    assert "make room and run prepare again" in message and message.count("\n") == 1


SCORE = """
from test_references import *
m, store = manifest(0, 20_000), ArrayStore(20_000)
writer = ReferenceWriter(disk, m, store.hashes)
try:
    while len(writer.missing):
        part = writer.missing[:100]
        writer.append(part, losses_of(part))
except OSError as error:
    print(error)
    print(len(ReferenceWriter(disk, m, store.hashes).missing), *[p for p in disk.glob("*.tmp")])
make_room()
writer = ReferenceWriter(disk, m, store.hashes)
writer.append(writer.missing, losses_of(writer.missing))
writer.close()
ids = np.arange(20_000)
assert np.array_equal(References.open([disk], store)[ids], losses_of(ids)[:, 0])
"""


def test_reference_losses(tmp_path):
    # 20 bytes a block and parts of 256 blocks, each in two pages
    error, state = on_a_small_disk(SCORE, tmp_path / "disk", 100).splitlines()
    missing = int(state)
    number = (20_000 - missing) // 256
    assert 0 < number < 20 and missing % 256 == 20_000 % 256
    assert error == (
        "[Errno 28] No space left on device: make room and run it again, it resumes where it "
        f"stopped: '{tmp_path / 'disk' / f'part-{number:05d}.npy'}'"
    )


RECORD = """
from test_curriculum import *
path = disk / "curriculum.rod"
curriculum = Curriculum.create(path, HEADER)
try:
    for step in range(1000):
        curriculum.append(step_of(step))
except OSError as error:
    print(error)
    print(len(curriculum), path.stat().st_size <= 16 << 10)
make_room()
for step in range(curriculum.next_step, 1000):
    curriculum.append(step_of(step))
check(Curriculum.open(path, read_only=True), 1000)
"""


def test_curriculum(tmp_path):
    error, state = on_a_small_disk(RECORD, tmp_path / "disk", 16).splitlines()
    assert error == (
        "[Errno 28] No space left on device: make room and run it again, it resumes where it "
        f"stopped: '{tmp_path / 'disk' / 'curriculum.rod'}'"
    )
    steps, fits = state.split()
    assert int(steps) > 50 and fits == "True"
