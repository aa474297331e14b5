"""The kit for GPU machines: code of one architecture is kept, and what ran is told truly."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

KIT = ROOT / "benchmarks" / "gpu_kit"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """One entry of a container: a header of 64 bytes, and the code."""
    head = struct.pack("<HHIQ", kind, 1, 64, len(code)) + struct.pack("<3I", 0, 0, 0)
    return head + struct.pack("<I", architecture) + bytes(64 - 32) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    whole = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    return whole + bytes(-len(whole) % 8)


def library(path: Path, code: bytes, name: bytes = b".nv_fatbin") -> Path:
    """A 64-bit ELF file with one section of device code."""
    names = b"\0" + name + b"\0.shstrtab\0"
    first = 64
    second = first + len(code)
    table = second + len(names)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, table)
    head += struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, 3, 2)
    rows = [(0, 0, 0), (1, first, len(code)), (2 + len(name), second, len(names))]
    sections = b"".join(
        struct.pack("<IIQQQQ", at, 1, 0, 0, offset, size) + bytes(24) for at, offset, size in rows
    )
    path.write_bytes(head + code + names + sections)
    return path


def python(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)


def test_code_of_one_architecture_is_kept_where_it_was(tmp_path):
    kept, other, text = b"W" * 40, b"O" * 24, b"P" * 16
    code = container(entry(2, 80, other), entry(2, 90, kept), entry(1, 90, text))
    code += bytes(16) + container(entry(2, 90, kept), entry(2, 100, other))
    file = library(tmp_path / "lib.so", code)
    before = file.read_bytes()
    done = python(KIT / "keep_architecture.py", file, 90)
    assert done.returncode == 0, done.stderr
    after = file.read_bytes()
    assert after == before.replace(other, bytes(24)).replace(text, bytes(16))
    assert after.count(kept) == 2


@pytest.mark.parametrize(
    ("content", "section", "sentence"),
    [
        (b"text" * 32, None, "this is no 64-bit little-endian ELF file"),
        (b"other section", b".rodata", "has no section .nv_fatbin"),
        (container(entry(2, 80, b"O" * 8)), b".nv_fatbin", "has no code for sm_90"),
    ],
)
def test_files_without_such_code_are_refused(tmp_path, content, section, sentence):
    file = tmp_path / "lib.so"
    if section is None:
        file.write_bytes(content)
    else:
        library(file, content, section)
    done = python(KIT / "keep_architecture.py", file, 90)
    assert done.returncode == 1 and sentence in done.stderr


def test_folders_are_left_out_of_wheels(tmp_path):
    file = tmp_path / "pulp-1-py3-none-any.whl"
    record = "pulp/a.py,,\npulp/solverdir/cbc,,\n"
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in (("pulp/a.py", "1"), ("pulp/solverdir/cbc", "2" * 1000)):
            archive.writestr(name, text)
        archive.writestr("pulp-1.dist-info/RECORD", record)
    program = (KIT / "leave_out.py", file, "pulp/solverdir/")
    assert python(*program).returncode == 0
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == ["pulp/a.py", "pulp-1.dist-info/RECORD"]
        assert archive.read("pulp-1.dist-info/RECORD") == b"pulp/a.py,,\n"
    again = python(*program)
    assert again.returncode == 1 and "has no file below pulp/solverdir/" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.fixture
def kit(tmp_path):
    """A kit whose project has a benchmark that ends badly, and no rehearsal."""
    folder = tmp_path / "kit"
    (folder / "wheels").mkdir(parents=True)
    write_run(folder, "torch", "json")
    bench = "import sys; print('<began>'); sys.exit(3)"
    files = {"benchmarks/gpu.py": bench, "nemo_rod/cli.py": "print('train')"}
    with tarfile.open(folder / "source.tar.gz", "w:gz") as archive:
        for name, text in {**files, "nemo_rod/__init__.py": ""}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    (folder / "wheels" / "empty-1-py3-none-any.whl").write_bytes(wheel())
    return folder


def write_run(kit: Path, *modules: str) -> None:
    """The kit's program, for a machine that must have these modules."""
    whole = (KIT / "run.py").read_text()
    text = re.sub(r"(?s)^MODULES = \(.*?^\)", f"MODULES = {modules}", whole, flags=re.M)
    assert text != whole
    (kit / "run.py").write_text(text)


def wheel() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: empty\nVersion: 1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            file.writestr(f"empty-1.dist-info/{name}", text)
    return data.getvalue()


@pytest.mark.slow
def test_parts_that_fail_are_told_as_such(kit, tmp_path):
    out = tmp_path / "out"
    options = ("--out", out, "--work", tmp_path / "work")
    done = python(kit / "run.py", "bench", "engine", "rehearse", *options)
    assert done.returncode == 1, done.stderr
    assert "bench, bench_vocabulary" in done.stdout
    outcomes = json.loads((out / "results.json").read_text())
    assert (outcomes["machine"]["device"], outcomes["machine"]["status"]) == ("CPU", 0)
    assert not outcomes["machine"]["last"] and "lacks modules" not in done.stdout
    assert outcomes["bench"]["status"] == 3 and outcomes["bench"]["last"] == "<began>"
    assert outcomes["engine"]["status"] == "left out: the kit has none"
    assert outcomes["rehearse"]["status"] == "left out: nemo-rod has no verb rehearse"
    page = (out / "index.html").read_text()
    assert "&lt;began&gt;" in page and "<began>" not in page
    assert (out / "log.txt").read_text() == "=== bench\n<began>\n=== bench_vocabulary\n<began>\n"
    # once the time is spent, nothing begins
    late = python(kit / "run.py", "bench", "--minutes", 0, *options)
    assert late.returncode == 1
    again = json.loads((out / "results.json").read_text())
    assert again["bench"]["status"] == "no time was left"
    assert again["engine"] == outcomes["engine"]


@pytest.mark.slow
def test_modules_that_the_machine_lacks_are_named(kit, tmp_path):
    write_run(kit, "torch", "no_such_one", "no_such_two")
    out = tmp_path / "out"
    done = python(kit / "run.py", "machine", "--out", out, "--work", tmp_path / "work")
    facts = json.loads((out / "results.json").read_text())["machine"]
    assert facts["device"] == "CPU" and done.returncode == facts["status"] == 1
    sentence = "This machine lacks modules that the kit needs: no_such_one, no_such_two."
    assert done.stdout.count(sentence) == facts["last"].count(sentence) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_benchmark_runs_whole_in_small(tmp_path, monkeypatch):
    file, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    words = ("--size", "tiny", "--repeats", 1, "--json", file, "--picture", picture)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    done = python(ROOT / "benchmarks" / "gpu.py", *words)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]}
    for passage in ("plain step", "forward of training", "scoring 8/8", "rod step 1/8"):
        assert rows[f"{passage}: time"]["value"] > 0
        assert rows[f"{passage}: memory beyond weights, gradients, optimizer"]["value"] >= 0
    assert rows["score moves: same call twice"]["holds"] is True
    assert rows["logits in slices of 4 MiB: time"]["value"] > 0
    for ratio, goal in (
        ("rod_over_limit", 1.03), ("averages_over_plain", 1.01), ("transfer_over_plain", 1.01),
    ):  # fmt: skip
        assert rows[ratio]["goal"] == goal and rows[ratio]["value"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_unknown_parts_are_refused(kit):
    done = python(kit / "run.py", "benches")
    assert done.returncode == 2
    assert "there is no part 'benches': expected machine, suite, bench" in done.stderr
