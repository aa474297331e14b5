"""`nemo-rod doctor`: what is installed and works on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.packages import can_be_found
from nemo_rod.commands.text import table
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.run.processes.pythons import worker_python
from nemo_rod.upstream.functions import ROADS

_USAGE = "nemo-rod doctor [BLOCKS] [functions=ROAD]"
_DESCRIPTION = """\
Shows what is installed, and whether it works on this machine. In NeMo-RL's image, shows then the
same of the environment of its Megatron workers. The exit status is 1 if something that is needed is
missing. With functions=, shows instead which of NVIDIA's functions are used."""
_SUM = "import torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1); "
_SUM += "d.all_reduce(x); assert x.item() == 2; d.destroy_process_group()"
# importing nemo_rod.megatron first makes Megatron importable without CUDA
_FUNCTIONS = "import json, nemo_rod.megatron; from nemo_rod.upstream import functions; "
_TRAINING = "needed to train and to score: make venv, or use NVIDIA's NeMo image"
_IN_WORKERS = "NeMo-RL's workers have it, below; `nemo-rod evaluate` needs it here"


class Finding(NamedTuple):
    """One line: what was checked, whether it is fine (None: not needed), what was found."""

    what: str
    fine: bool | None
    found: str
    advice: str = ""


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod doctor`."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument(
        "blocks", metavar="BLOCKS", type=Path, nargs="?", help="block store to verify, too"
    )
    roads = ("all", *ROADS)
    help = f"shows functions with their tested and installed parameters: {', '.join(roads)}"
    parser.add_keys(Key(name="functions", value="ROAD", help=help, choices=roads))
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints a line for every check; exits with status 1 if a required part is missing."""
    if options.functions is not None:
        rows = json.loads(_look(f"functions.rows({options.functions!r})"))
        print(table(("function", "use", "roads", "tested", "installed"), rows))
        return
    workers = worker_python()
    findings = []
    for finding in look(options.blocks, workers):
        state = {True: "ok", None: "-", False: "NO"}[finding.fine]
        text = finding.found + (
            f": {finding.advice}" if finding.advice and not finding.fine else ""
        )
        print(table(("", "", ""), [[f"{state:<2}", f"{finding.what:<18}", text]]), flush=True)
        findings.append(finding)
    fine = all(finding.fine is not False for finding in findings)
    if workers is not None:
        print(f"\nNeMo-RL's Megatron workers, {workers}:", flush=True)
        fine = _is_fine(workers) and fine
    if not fine:
        raise SystemExit(1)


def _is_fine(python: Path) -> bool:
    """Runs the doctor in another environment; returns whether nothing is missing there."""
    variables = {k: v for k, v in os.environ.items() if k != "NEMO_RL_VENV_DIR"}
    command = [str(python), "-m", "nemo_rod.cli", "doctor"]
    return subprocess.run(command, env=variables).returncode == 0


def look(blocks: Path | None = None, workers: Path | None = None) -> Iterator[Finding]:
    """Checks one part after the other, and a block store in addition.

    Megatron is not needed here if `workers`, a Python of another environment, trains.
    """
    tested = (3, 11) <= sys.version_info < (3, 14)
    yield Finding("python", tested, platform.python_version(), "use Python 3.11, 3.12 or 3.13")
    yield _installed("hydra", "hydra-core", "needed for recipes: pip install hydra-core")
    yield _installed("torch", "torch", _TRAINING)
    advice, missing = (_TRAINING, False) if workers is None else (_IN_WORKERS, None)
    for name in ("core", "bridge"):
        package, module = f"megatron-{name}", f"megatron.{name}"
        yield _installed(package, package, advice, missing, module)
    yield _installed(
        "transformers", "transformers", "needed for checkpoints and tokenizers: make venv"
    )
    for name in ("datasets", "pyarrow", "zstandard"):
        yield _installed(
            name, name, "only for such input: make venv, or pip install nemo-rod[data]", None
        )
    yield _installed("lm-eval", "lm-eval", "only for tasks=...: pip install nemo-rod[eval]", None)
    yield _attempt("devices", _devices, _TRAINING)
    if workers is None or can_be_found("megatron.core"):
        yield _attempt("trainer", _trainer, _TRAINING)
        yield _attempt(
            "megatron functions", _functions, "nemo-rod doctor functions=all shows all of them"
        )
    yield _attempt("torchrun, gloo", _torchrun, "several processes cannot talk to each other here")
    yield _attempt("block store", _store, "blocks cannot be written or read here: see the reason")
    if blocks is not None:
        yield _attempt(
            str(blocks), lambda: _verify(blocks), "prepare them again, or restore a copy"
        )
    tools = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    found = f"{' and '.join(tools)} missing" if tools else "can fetch the texts of recipe=toy"
    yield Finding("apt", None if tools else True, found, "use recipe=toy_synthetic")


def _installed(
    what: str,
    package: str,
    advice: str,
    missing: bool | None = False,
    module: str | None = None,
) -> Finding:
    try:
        return Finding(what, True, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        if module is not None and can_be_found(module):  # NVIDIA's images have sources on the path
            return Finding(what, True, "there, but pip does not list it")
        return Finding(what, missing, "not installed", advice)


def _attempt(what: str, action: Callable[[], str], advice: str) -> Finding:
    """Runs a check and reports any exception as its finding."""
    try:
        return Finding(what, True, action())
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Finding(what, False, reason[-600:], advice)


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return f"CPU only, {len(os.sched_getaffinity(0))} cores: enough for the toys"
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _trainer() -> str:
    _run([sys.executable, "-c", "import nemo_rod.megatron.train_job"])
    return "Megatron-Bridge's pretrain() loads"


def _functions() -> str:
    return json.loads(_look("functions.counts()"))


def _look(what: str) -> str:
    """Returns the last output line of a process that may import Megatron, whose imports print."""
    done = _run([sys.executable, "-c", f"{_FUNCTIONS}print(json.dumps({what}))"])
    return done.splitlines()[-1]


def _torchrun() -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1", "--no-python", sys.executable, "-c", _SUM]
    _run(command)
    return "two processes added up a number"


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError(lines[0] if lines else f"exit status {done.returncode}")
    return done.stdout


def _store() -> str:
    with tempfile.TemporaryDirectory() as folder:
        sources = [
            SourceSpec(
                name=role, role=role, kind="synthetic", files=[f"markov:{i}"], max_bytes=9999
            )
            for i, role in enumerate(("adaptation", "replay"))
        ]
        store = prepare(
            folder, sources, tokenizer=load_tokenizer("byte"), block_size=64, holdout_fraction=0.1
        )
        store.verify()
        count = len(store)
        same = _read_by_megatron(store)
    return f"{count} blocks written and read" + (", by Megatron too" if same else "")


def _read_by_megatron(store: BlockStore) -> bool:
    """Returns whether Megatron is installed and reads the same tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages
        try:
            from megatron.core.datasets.indexed_dataset import IndexedDataset
        except ImportError:
            return False
    source = store.sources[0]
    shard = IndexedDataset(str(store.root / source.role / source.name / "tokens-00000"))
    assert (np.asarray(shard[0]) == store.tokens([source.start])[0]).all(), "Megatron reads others"
    return True


def _verify(blocks: Path) -> str:
    store = BlockStore(blocks)
    store.verify()
    return f"{len(store):,} blocks, all as they were written"
