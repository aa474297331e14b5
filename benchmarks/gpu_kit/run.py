"""Runs on a plain GPU machine, without a network: suite, benchmark and rehearsal, then a page.

    python3 run.py [PART ...] [--out FOLDER] [--minutes 28] [--size 05b]

Parts run in this order: machine, suite, bench, engine, rehearse, engine_suite, engine_bench and
trainer. The part `machine` names the modules that the machine lacks. The part `engine` unpacks
TransformerEngine and compiles its PyTorch part, or takes the kit's engine/*.so if an earlier run's
FOLDER/engine was put there; engine_suite and engine_bench repeat suite and
benchmark with its layers. Each part has a time limit, and none begins once the
minutes are spent, so parts can also be run one by one, on one machine, into one folder. Without a
GPU all is tiny, to prove the kit. requirements/gpu-kit.txt says what the machine must have.

FOLDER gets results.json, index.html with all pictures inside, log.txt, and the benchmark's files.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parent
MINUTES = 28.0
PACKAGES = (
    "torch", "triton", "numpy", "transformers", "tokenizers", "megatron-core", "megatron-bridge",
    "transformer-engine", "pytest",
)  # fmt: skip
MODULES = (  # what the kit's packages import and the kit does not bring
    "aiohttp", "einops", "filelock", "fsspec", "httpx", "huggingface_hub", "jinja2", "numpy",
    "packaging", "pandas", "psutil", "pyarrow", "pytest", "pytest_timeout", "regex",
    "requests", "rich", "safetensors", "scipy", "torch", "tqdm", "triton", "xxhash", "yaml",
)  # fmt: skip
VOCABULARY = 248_320  # of the largest models that the recipes train
MACHINE = f"""
import importlib.metadata as m, importlib.util, json, os, platform
lacks = [name for name in {MODULES!r} if importlib.util.find_spec(name) is None]
sentence = "This machine lacks modules that the kit needs: " + ", ".join(lacks) + "."
if "torch" in lacks: raise SystemExit(sentence)
import torch
facts = {{"python": platform.python_version(), "cores": os.cpu_count()}}
for name in {PACKAGES!r}:
    try: facts[name] = m.version(name)
    except m.PackageNotFoundError: facts[name] = None
facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
facts["devices"] = torch.cuda.device_count()
facts["cuda"] = torch.version.cuda
print(json.dumps(facts))
if lacks: raise SystemExit(sentence)
"""


class Kit:
    """The unpacked kit, and what has run so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out.resolve()
        self.work: Path = options.work.resolve()
        self.end = time.monotonic() + 60 * options.minutes
        self.scale: float = options.minutes / MINUTES  # of the parts' own limits
        self.size: str = options.size
        self.out.mkdir(parents=True, exist_ok=True)
        kept = self.out / "results.json"
        self.results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
        self.source, self.site = self.work / "source", self.work / "site"
        self.engine = self.work / "engine"

    def unpack(self) -> None:
        """Puts the wheels and the source beside each other, once."""
        if self.source.exists():
            return
        for folder in (self.work, self.site):
            folder.mkdir(parents=True, exist_ok=True)
        wheels = [str(wheel) for wheel in sorted((KIT / "wheels").glob("*.whl"))]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(self.site)]
        subprocess.run([*pip, *options, *wheels], check=True)
        making = self.work / "source.part"
        with tarfile.open(KIT / "source.tar.gz") as archive:
            archive.extractall(making, filter="data")
        making.rename(self.source)

    def environment(self, engine: bool) -> dict[str, str]:
        paths = [*([self.engine] if engine else []), self.site, self.source]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits every time
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "4",
        }

    def run(self, part: str, command: list[str], minutes: float, *, engine: bool = False) -> bool:
        """Runs a command with its output in log.txt; returns whether it ended well, and in time."""
        limit = min(60 * minutes * self.scale, self.end - time.monotonic())
        begin = time.monotonic()
        status: int | str = "no time was left"
        log = self.out / "log.txt"
        with log.open("a") as file:
            file.write(f"=== {part}\n")
        written = log.stat().st_size
        if limit > 10:
            status = self._ended(command, limit, self.environment(engine), log)
        seconds = round(time.monotonic() - begin, 1)
        last = log.read_bytes()[written:].decode(errors="replace").splitlines()[-15:]
        self.note(part, {"status": status, "seconds": seconds, "last": "\n".join(last)})
        return status == 0

    def _ended(
        self, command: list[str], limit: float, environment: dict[str, str], log: Path
    ) -> int | str:
        with log.open("a") as file:
            process = subprocess.Popen(
                command, cwd=self.source, env=environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started would keep the GPU busy
            process.wait()
            return f"did not end within {limit / 60:.1f} minutes"

    def note(self, part: str, outcome: dict[str, Any]) -> None:
        self.results[part] = outcome
        (self.out / "results.json").write_text(json.dumps(self.results, indent=2) + "\n")
        print(f"{part}: {outcome.get('status')} after {outcome.get('seconds')} s", flush=True)

    @property
    def on_gpu(self) -> bool:
        return self.results.get("machine", {}).get("device", "CPU") != "CPU"


def machine(kit: Kit) -> None:
    """Notes the device and the versions, or which modules are missing."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", MACHINE], env=kit.environment(False), capture_output=True, text=True
    )
    facts = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    ended = {"status": done.returncode, "seconds": round(time.monotonic() - begin, 1)}
    kit.note("machine", {**facts, **ended, "last": done.stderr[-2000:]})
    if done.returncode:
        print(done.stderr[-2000:].rstrip(), flush=True)


def suite(kit: Kit, engine: bool = False) -> None:
    """Tests for GPUs; without one, they are skipped and their bodies run in small."""
    # a lane's marker replaces the project's own choice; a body's own test has none, and the slow
    # one runs the benchmark, which is a part of its own
    choice = ["-m", "gpu"] if kit.on_gpu else ["-m", "gpu or not slow"]
    _tests(kit, "engine_suite" if engine else "suite", [*choice, "tests/gpu"], 6, engine)


def trainer(kit: Kit) -> None:
    """RoD's steps against stock steps in Megatron-Bridge's own trainer."""
    if kit.on_gpu:
        _tests(kit, "trainer", ["-m", "gpu", "tests/megatron"], 6, has_engine(kit))
    else:
        kit.note("trainer", {"status": "left out: this machine has no GPU", "seconds": 0})


def _tests(kit: Kit, part: str, choice: list[str], minutes: float, engine: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *choice]
    kit.run(part, [*command, "-o", "timeout=400"], minutes, engine=engine)


def bench(kit: Kit, engine: bool = False) -> None:
    size = kit.size if kit.on_gpu else "tiny"
    part = "engine_bench" if engine else "bench"
    layers = "te" if engine else "local"
    command = [sys.executable, "benchmarks/gpu.py", "--size", size, "--layers", layers]
    files = ["--json", str(kit.out / f"{part}.json"), "--picture", str(kit.out / f"{part}.png")]
    kit.run(part, [*command, *files], 6, engine=engine)
    if not engine:  # the output layer is the same with either layers
        part = "bench_vocabulary"
        only = ["--vocab", str(VOCABULARY), "--only", "slices"]
        only += [] if kit.on_gpu else ["--repeats", "1"]
        file = ["--json", str(kit.out / f"{part}.json")]
        kit.run(part, [*command, *only, *file], 3)


def engine(kit: Kit) -> None:
    """Unpacks TransformerEngine and compiles its PyTorch part against this machine's torch."""
    packed = KIT / "engine"
    if not packed.is_dir() or not kit.on_gpu:
        why = "the kit has none" if not packed.is_dir() else "this machine has no GPU"
        kit.note("engine", {"status": f"left out: {why}", "seconds": 0})
        return
    sources = next(packed.glob("transformer_engine_torch-*.tar.gz"))
    for archive, folder in ((packed / "site.tar.xz", kit.engine), (sources, kit.work)):
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    build = kit.work / sources.name.removesuffix(".tar.gz")
    compiled = list(packed.glob("transformer_engine_torch*.so"))
    for file in compiled:
        shutil.copy(file, kit.engine)
    script = f"""
import glob, os, shutil, subprocess, sys, nvidia
os.chdir({str(build)!r})
headers = glob.glob(list(nvidia.__path__)[0] + "/*/include")
os.environ.update(CPATH=":".join(headers), NVTE_PYTORCH_FORCE_BUILD="TRUE", NVTE_WITH_NCCL_EP="0",
                  NVTE_BUILD_WITH_NCCL_EP="0", MAX_JOBS=str(os.cpu_count()),
                  NVTE_CUDA_ARCHS={(packed / "architecture").read_text().strip()!r})
command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", {str(kit.engine)!r}]
subprocess.run(command, check=True)
for built in glob.glob("**/transformer_engine_torch*.so", recursive=True):
    shutil.copy(built, {str(kit.engine)!r})
"""
    if compiled:
        kit.note("engine", {"status": 0, "seconds": 0, "last": "compiled in an earlier run"})
    elif kit.run("engine", [sys.executable, "-c", script], 8, engine=True):
        (kit.out / "engine").mkdir(exist_ok=True)
        for file in kit.engine.glob("transformer_engine_torch*.so"):
            shutil.copy(file, kit.out / "engine")
    if kit.results["engine"]["status"] == 0:
        check = (
            "import torch, transformer_engine.pytorch as te; "
            "x = torch.randn(64, 1024, device='cuda', dtype=torch.bfloat16); "
            "print(te.Linear(1024, 1024, params_dtype=torch.bfloat16).cuda()(x).sum())"
        )
        kit.run("engine_check", [sys.executable, "-c", check], 2, engine=True)


def has_engine(kit: Kit) -> bool:
    return kit.results.get("engine_check", {}).get("status") == 0


def engine_suite(kit: Kit) -> None:
    if has_engine(kit):
        suite(kit, engine=True)


def engine_bench(kit: Kit) -> None:
    if has_engine(kit):
        bench(kit, engine=True)


def rehearse(kit: Kit) -> None:
    """A whole recipe, shrunk, if this version has the verb."""
    verb = [sys.executable, "-m", "nemo_rod.cli"]
    known = subprocess.run(
        [*verb, "--help"],
        cwd=kit.source,
        env=kit.environment(False),
        capture_output=True,
        text=True,
    )
    if "rehearse" not in known.stdout:
        kit.note("rehearse", {"status": "left out: nemo-rod has no verb rehearse", "seconds": 0})
        return
    folder = f"run_dir={kit.work / 'rehearsal'}"
    recipe = "recipe=german_qwen3_5_4b"
    kit.run("rehearse", [*verb, "rehearse", recipe, folder], 8, engine=has_engine(kit))


PARTS: dict[str, Callable[[Kit], None]] = {
    part.__name__: part
    for part in (machine, suite, bench, engine, rehearse, engine_suite, engine_bench, trainer)
}


def page(kit: Kit) -> None:
    """Writes index.html: what ran, the benchmark's tables and its pictures."""
    facts = kit.results.get("machine", {})
    sections = [
        f"<h1>nemo_rod on {html.escape(str(facts.get('device', 'an unknown machine')))}</h1>"
    ]
    sections.append(_table(("", ""), [(k, v) for k, v in facts.items() if k not in ("last",)]))
    ran = [(k, v) for k, v in kit.results.items() if k != "machine"]
    rows = [(name, outcome.get("status"), outcome.get("seconds")) for name, outcome in ran]
    sections.append("<h2>Parts</h2>" + _table(("part", "exit status", "seconds"), rows))
    for name in ("bench", "bench_vocabulary", "engine_bench"):
        file, picture = kit.out / f"{name}.json", kit.out / f"{name}.png"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        title = f"{name}: {result['setting']['size']}, layers {result['setting']['layers']}"
        sections.append(f"<h2>{html.escape(title)}, {result['date']}</h2>")
        if picture.exists():
            data = base64.b64encode(picture.read_bytes()).decode()
            sections.append(f'<img alt="roofline" src="data:image/png;base64,{data}">')
        columns = ("what", "value", "unit", "goal", "holds")
        shown = [tuple(_short(row[column]) for column in columns) for row in result["rows"]]
        sections.append(_table(columns, shown))
    for name, outcome in ran:
        if outcome.get("last"):
            sections.append(
                f"<h2>{name}: end of its log</h2><pre>{html.escape(outcome['last'])}</pre>"
            )
    style = (
        "body{font:15px/1.4 sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:left;padding:.15rem .8rem .15rem 0}img{max-width:100%}"
        "pre{background:#f4f4f4;padding:.6rem;overflow:auto;font-size:12px}"
    )
    head = (
        f"<!doctype html><meta charset=utf-8><title>nemo_rod on a GPU</title><style>{style}</style>"
    )
    (kit.out / "index.html").write_text(head + "\n".join(sections))


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: tuple[str, ...], rows: list[tuple]) -> str:
    def line(cells: tuple, tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(columns, 'th')}</tr>{body}</table>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "nemo-rod-gpu-kit"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--size", default="05b", help="of the benchmark, on a GPU")
    parser.add_argument("--fresh", action="store_true", help="unpack anew")
    options = parser.parse_args()
    unknown = sorted({*options.parts} - {*PARTS})
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: expected {', '.join(PARTS)}")
    if options.fresh and options.work.exists():
        shutil.rmtree(options.work)
    kit = Kit(options)
    kit.unpack()
    selected = options.parts or list(PARTS)
    for name in PARTS:
        if name in selected or (name == "machine" and "machine" not in kit.results):
            PARTS[name](kit)
            page(kit)
    bad = [k for k, v in kit.results.items() if v.get("status") != 0 and "left out" not in str(v)]
    print(f"{kit.out / 'index.html'}; not well: {', '.join(bad) or 'nothing'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
