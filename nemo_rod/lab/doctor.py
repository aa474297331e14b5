"""`nemo-rod doctor`: checks of this machine's installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_rod.commands.arguments import Arguments, Key
from nemo_rod.commands.text import table
from nemo_rod.corpus import BlockStore, SourceSpec, load_tokenizer, prepare
from nemo_rod.corpus.adapters.hub_files import file_of
from nemo_rod.installation import clash, page, pip_install
from nemo_rod.lab.ignored_keys import ignored_keys, sentence
from nemo_rod.lab.text import say_briefly
from nemo_rod.roles import ROLES
from nemo_rod.run.processes.pythons import can_be_found, sees_gpu, worker_python
from nemo_rod.upstream.functions import FUNCTIONS, ROADS, TESTED, Function, check, for_road

_USAGE = "nemo-rod doctor [BLOCKS] [base=MODEL] [functions=ROAD]"
_DESCRIPTION = """\
Shows what is installed, and whether it works on this machine; in NeMo-RL's image, also for the
environment of its Megatron workers. The exit status is 1 if a required part is missing. With
functions=, shows which of NVIDIA's functions are used instead."""
_SUM = (
    "import torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1); "
    "d.all_reduce(x); assert x.item() == 2; d.destroy_process_group()"
)
# importing nemo_rod.megatron first makes Megatron importable without CUDA
_FUNCTIONS = "import json, nemo_rod.megatron; from nemo_rod.lab import doctor; "
_ALL = "`make venv` in a clone"
_TRAINING = f"needed to train and to score: {_ALL}, or use an image of {page('images')}"
_IN_WORKERS = "NeMo-RL's workers have it, see below; `nemo-rod evaluate` needs it here"


class Finding(NamedTuple):
    """The result of one check."""

    name: str  # checked part
    fine: bool | None  # whether it works; None: missing, but not needed
    result: str
    advice: str = ""  # cure, shown unless it is fine


def declare(parser: Arguments) -> None:
    """Declares the arguments of `nemo-rod doctor`."""
    parser.usage, parser.description = _USAGE, _DESCRIPTION
    parser.add_argument(
        "blocks", metavar="BLOCKS", type=Path, nargs="?", help="block store to verify, too"
    )
    roads = ("all", *ROADS)
    help = f"shows functions with their tested and installed parameters: {', '.join(roads)}"
    base = "folder or hub name of a base: does Megatron-Bridge take its whole config.json over?"
    parser.add_keys(Key("functions", "ROAD", help, choices=roads), Key("base", "MODEL", base))
    parser.set_defaults(main=main)


def main(options: Namespace) -> None:
    """Prints a line for every check; exits with status 1 if a required part is missing."""
    if options.functions is not None:
        rows = json.loads(_evaluate(f"doctor.function_rows({options.functions!r})"))
        print(table(("function", "use", "roads", "tested", "installed"), rows))
        return
    if options.blocks is not None and not options.blocks.exists():
        raise ValueError(f"{options.blocks} does not exist: expected {_USAGE}.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # the lines say more
    workers, all_fine = worker_python(), True
    for name, fine, result, advice in findings(options.blocks, workers, options.base):
        state = {True: "ok", None: "-", False: "NO"}[fine]
        text = f"{result}: {advice}" if advice and not fine else result
        say_briefly("")
        print(table(("", "", ""), [[f"{state:<2}", f"{name:<18}", text]]), flush=True)
        all_fine &= fine is not False
    if workers is not None:
        print(f"\nNeMo-RL's Megatron workers, {workers}:", flush=True)
        variables = {k: v for k, v in os.environ.items() if k != "NEMO_RL_VENV_DIR"}
        command = [str(workers), "-P", "-m", "nemo_rod.cli", "doctor"]
        all_fine &= subprocess.run(command, env=variables).returncode == 0
    if not all_fine:
        raise SystemExit(1)


def findings(
    blocks: Path | None = None, workers: Path | None = None, base: str | None = None
) -> Iterator[Finding]:
    """Checks one part after the other.

    `workers` is a Python of another environment that trains; Megatron is not needed here then.
    """
    tested = (3, 11) <= sys.version_info < (3, 14)
    yield Finding("python", tested, platform.python_version(), "use Python 3.11, 3.12 or 3.13")
    yield _check_package("hydra", "hydra-core", "needed for recipes: pip install hydra-core")
    yield _check_package("torch", "torch", _TRAINING)
    advice, missing = (_TRAINING, False) if workers is None else (_IN_WORKERS, None)
    for name in ("core", "bridge"):
        package, module = f"megatron-{name}", f"megatron.{name}"
        yield _mark_untested(_check_package(package, package, advice, missing, module))
    advice = f"needed for checkpoints and tokenizers: {_ALL}, or {pip_install('data')}"
    found = _check_package("transformers", "transformers", advice)
    why = clash("megatron-bridge", "transformers")
    yield found._replace(fine=None, result=why) if why else found
    advice = f"only for such input: {_ALL}, or {pip_install('data')}"
    for name in ("datasets", "pyarrow", "zstandard"):
        yield _check_package(name, name, advice, None)
    advice = f"only for tasks=...: {pip_install('eval')}"
    yield _check_package("lm-eval", "lm-eval", advice, None)
    yield _attempt("devices", _devices, _TRAINING)
    if sees_gpu() and can_be_found("fla"):
        advice = "Qwen3.5 would train wrongly, or hang: see the reason"
        probe = [sys.executable, "-P", "-m", "nemo_rod.lab.delta_net_probe"]
        yield _attempt("gated delta net", lambda: _run(probe).splitlines()[-1], advice)
    if workers is None or can_be_found("megatron.core"):
        yield _attempt("trainer", _trainer, _TRAINING)
        advice = "nemo-rod doctor functions=all shows all of them"
        count = lambda: str(json.loads(_evaluate("doctor.function_counts()")))  # noqa: E731
        yield _attempt("megatron functions", count, advice)
        if base is not None:
            keys = ignored_keys(base)
            is_there = file_of(base, "config.json") is not None
            fine = base if is_there else f"{base} has no config.json on this machine"
            result = sentence(keys, base) if keys else fine
            yield Finding("base", True if is_there and not keys else None, result)
    yield _attempt("torchrun, gloo", _torchrun, "several processes cannot communicate here")
    yield _attempt("block store", _store, "blocks cannot be written or read here: see the reason")
    if blocks is not None:
        advice = "prepare them again, or restore a copy"
        yield _attempt(str(blocks), lambda: _verify(blocks), advice)
    tools = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    result = f"{' and '.join(tools)} missing" if tools else "can fetch the texts of recipe=toy"
    yield Finding("apt", None if tools else True, result, "use recipe=toy_synthetic")


def _check_package(
    name: str, package: str, advice: str, missing: bool | None = False, module: str | None = None
) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        if module is not None and can_be_found(module):  # NVIDIA's images have sources on the path
            return Finding(name, True, "there, but pip does not list it")
        return Finding(name, missing, "not installed", advice)


def _attempt(name: str, action: Callable[[], str], advice: str) -> Finding:
    """Runs a check, whose result is its text or any exception."""
    say_briefly(f"   {name} ...")
    try:
        return Finding(name, True, action())
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Finding(name, False, reason[-600:], advice)


def _mark_untested(finding: Finding) -> Finding:
    """Adds that a version is newer than the tested ones, which may work all the same."""
    newest = TESTED[finding.name]
    if [int(n) for n in re.findall(r"\d+", finding.result)[:3]] > [*map(int, newest.split("."))]:
        return finding._replace(result=f"{finding.result}, untested: the newest tested is {newest}")
    return finding


def _devices() -> str:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return f"CPU only, {len(os.sched_getaffinity(0))} cores: enough for the toys"
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _trainer() -> str:
    _run([sys.executable, "-P", "-c", "import nemo_rod.megatron.train_job"])
    return "Megatron-Bridge's pretrain() loads"


def _evaluate(expression: str) -> str:
    """Returns the last output line of a process that may import Megatron, whose imports print."""
    output = _run([sys.executable, "-P", "-c", f"{_FUNCTIONS}print(json.dumps({expression}))"])
    return output.splitlines()[-1]


def _torchrun() -> str:
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1", "--no-python", sys.executable, "-P", "-c", _SUM]
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
            for i, role in enumerate(ROLES)
        ]
        store = prepare(
            folder, sources, tokenizer=load_tokenizer("byte"), block_size=64, holdout_fraction=0.1
        )
        store.verify()
        by_megatron = ""
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore")  # about optional packages
            from megatron.core.datasets.indexed_dataset import IndexedDataset

            first = store.sources[0]
            shard = IndexedDataset(str(store.root / first.role / first.name / "tokens-00000"))
            same = (np.asarray(shard[0]) == store.tokens([first.start])[0]).all()
            assert same, "Megatron reads other tokens"
            by_megatron = ", by Megatron too"
        return f"{len(store)} blocks written and read{by_megatron}"


def _verify(blocks: Path) -> str:
    store = BlockStore(blocks)
    store.verify()
    return f"{len(store):,} blocks, all as they were written"


def function_counts() -> str:
    """Returns the number of functions of each road available on this machine, as text.

    Raises:
        ValueError: one of the functions differs from the tested one.
    """
    import torch

    roads = ["scoring", "trainer", "swap_in/megatron_bridge"]
    if not torch.cuda.is_available():
        roads += ["cpu", "cpu/megatron_bridge"]
    if importlib.util.find_spec("transformer_engine") is None:
        roads += ["plain", "plain/megatron_bridge"]
    check(*roads)
    return ", ".join(f"{road} {len(for_road(road))}" for road in roads)


def function_rows(road: str) -> list[list[str]]:
    """Returns function, use, roads, tested and installed parameters of a road, or of "all"."""

    def installed_parameters(function: Function) -> str:
        try:
            signature, problem = function.installed_signature(), function.problem()
        except ImportError:  # the package or one of its dependencies is missing
            return "-"
        text = "not there" if signature is None else f"({', '.join(signature.parameters)})"
        return text if problem is None else f"NO: {text}"

    return [
        [
            function.where,
            function.use,
            " ".join(function.roads),
            " or ".join(f"({text})" for text in function.signatures),
            installed_parameters(function),
        ]
        for function in (FUNCTIONS if road == "all" else for_road(road))
    ]
