"""What several test files share: reproducible property tests and real processes on gloo."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from preloaded import STACKS, Run
from tiny import MOE_ARCHITECTURE, Setting

from nemo_rod.run.processes.pythons import sees_gpu
from tests import lanes

_START = time.time()


def pytest_configure(config: pytest.Config) -> None:
    for lane in lanes.LANES:
        if lane.name in lanes.MARKERS:
            config.addinivalue_line("markers", f"{lane.name}: {lane.about} (make {lane.target})")
    config.option.markexpr = config.option.markexpr or lanes.LANES[0].expression
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of xdist's processes, a core for each
    # GPU images may lack Hypothesis. Derandomised, so that a failure in one place is a failure in
    # every place; no deadline, because a shared machine is slow at times.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("nemo_rod", derandomize=True, deadline=None)
        settings.load_profile("nemo_rod")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `torchrun` makes takes longest, and under xdist it is for one process to do."""
    items.sort(key=lambda item: group(item.nodeid) != "torchrun")


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together, and so do all that share what `torchrun` makes."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


def group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "torchrun" if _needs_torchrun(file) else file


@functools.cache
def _needs_torchrun(file: str) -> bool:
    return re.search(r"\b(torchrun|tiny|moe): ", (TESTS.parent / file).read_text()) is not None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Notes a lane that has passed whole; see `lanes.py`."""
    if hasattr(session.config, "workerinput"):
        return  # one of xdist's processes, which knows of its own tests only
    option = session.config.option
    part = ("keyword", "lf", "ff", "collectonly")  # the two in the middle are a plugin's
    lane = lanes.of_run(option.markexpr, session.config.args)
    if exitstatus or lane is None or any(getattr(option, name, False) for name in part):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    counts = {what: len(reporter.stats.get(what, ())) for what in ("passed", "skipped")}
    if counts["passed"]:
        lanes.record(lane, {**counts, "seconds": round(time.time() - _START), "with": versions()})


def versions() -> str:
    """What the tests ran on."""
    found = [f"Python {platform.python_version()}"]
    for package in ("megatron-bridge", "megatron-core", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Setting:
    """A store, a base, a specialist and both references, made by the real stages."""
    return Setting(tmp_path_factory.mktemp("tiny"), torchrun)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Setting:
    """The tiny setting with four experts in every layer."""
    return Setting(tmp_path_factory.mktemp("moe"), torchrun, MOE_ARCHITECTURE)


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Runs a program under torchrun's agent on this machine.

    `torchrun(nproc, target, *args, timeout=600, env=None, cwd=None, expect_failure=False)` runs
    `target` (a script's path, or a module's name) in `nproc` processes and returns what each rank
    printed (stdout, then stderr), in the order of the ranks. It fails the test with the tails of
    the ranks' logs when a rank fails (or, with `expect_failure`, when none does), and when the run
    outlasts `timeout` seconds; nothing it started lives on.

    The processes are forks of one that has imported Megatron (`preloaded.py`). With `fresh=True`
    they are started by the `torchrun` program itself, for what changes imports or the environment
    that they read; so they are where there is a GPU, whose driver does not survive a fork.
    """
    preloaded: list[subprocess.Popen[bytes]] = []

    def run(
        nproc: int,
        target: str | Path,
        *args: object,
        timeout: float = 600,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        expect_failure: bool = False,
        fresh: bool = False,
    ) -> list[str]:
        logs = tmp_path_factory.mktemp("torchrun")
        arguments = [str(target), *map(str, args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        try:
            if fresh or sees_gpu():
                code = _run_torchrun(nproc, arguments, environment, cwd, logs, timeout)
            else:
                if not preloaded:
                    preloaded.append(_start_preloaded())
                wanted = Run(
                    nproc=nproc,
                    target=arguments[0],
                    arguments=arguments[1:],
                    environment=environment,
                    path=(env or {}).get("PYTHONPATH", "").split(":") if env else [],
                    folder=str(cwd or Path.cwd()),
                    logs=str(logs),
                )
                code = _run_preloaded(preloaded[0], wanted, timeout)
            ended = f"ended with exit code {code}"
            outcome = f"did not end within {timeout:g} s" if code is None else ended
        except pytest.fail.Exception as interrupted:  # the test's own limit, by pytest-timeout
            code, outcome = None, f"had not ended: {interrupted.msg}"
        outputs = [_output(logs, rank) for rank in range(nproc)]
        if code is None or (code != 0) != expect_failure:
            pytest.fail(_report(outcome, arguments, outputs, logs), pytrace=False)
        return outputs

    yield run
    for server in preloaded:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(30)


def _start_preloaded() -> subprocess.Popen[bytes]:
    # a process that has asked CUDA for GPUs has no forks that can use them; NVML may be asked
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    program = str(TESTS / "helpers" / "preloaded.py")
    return subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, env=environment)


def _run_preloaded(server: subprocess.Popen[bytes], run: Run, timeout: float) -> int | None:
    """The run's exit code, or None if it did not end in time."""
    assert server.stdin is not None
    server.stdin.write(run.line())
    server.stdin.flush()
    logs, end = Path(run.logs), time.monotonic() + timeout
    try:
        while not (logs / "exit").exists():
            if time.monotonic() > end:
                return None
            assert server.poll() is None, "the process that imports Megatron for all runs ended"
            time.sleep(0.05)
        return int((logs / "exit").read_text())
    finally:
        if (logs / "pid").exists():
            pid = int((logs / "pid").read_text())
            if not (logs / "exit").exists():
                _signal(pid, STACKS)
                time.sleep(1)  # until they are written
            _signal(pid, signal.SIGKILL)


def _run_torchrun(
    nproc: int,
    program: list[str],
    environment: dict[str, str],
    cwd: Path | None,
    logs: Path,
    timeout: float,
) -> int | None:
    """Its exit code, or None if it did not end in time."""
    command = [
        # --standalone lets the rendezvous pick a free port itself, so that parallel runs never meet
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)),
        *("--redirects", "3", "--log-dir", str(logs)),
        *([] if program[0].endswith(".py") else ["-m"]),
        *program,
    ]
    with open(logs / "launcher.log", "wb") as log:
        launcher = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=cwd
        )
        try:
            return launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _signal(launcher.pid, signal.SIGKILL)
            launcher.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    """To a launcher that still runs, and to its ranks, which may have sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _output(logs: Path, rank: int) -> str:
    files = sorted(logs.glob(f"*/*/{rank}/stdout.log")) + sorted(
        logs.glob(f"*/*/{rank}/stderr.log")
    )
    return "".join(file.read_text(errors="replace") for file in files)


def _report(outcome: str, command: Sequence[str], outputs: Sequence[str], logs: Path) -> str:
    named = [(f"rank {rank}", text) for rank, text in enumerate(outputs)]
    launcher = logs / "launcher.log"  # absent before the process that runs share has imported all
    named.append(("torchrun", launcher.read_text(errors="replace") if launcher.exists() else ""))
    tails = [f"--- {name} ---\n" + "\n".join(text.splitlines()[-40:]) for name, text in named]
    return "\n".join([f"{' '.join(command)}\n{outcome}; the last lines of each log:", *tails])
