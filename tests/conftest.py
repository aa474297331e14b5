"""What several test files share: reproducible property tests and real processes on gloo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny import MOE_ARCHITECTURE, Setting


def pytest_configure(config: pytest.Config) -> None:
    # GPU images may lack Hypothesis. Derandomised, so that a failure in one place is a failure in
    # every place; no deadline, because a shared machine is slow at times.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("nemo_rod", derandomize=True, deadline=None)
        settings.load_profile("nemo_rod")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Setting:
    """A store, a base, a specialist and both references, made by the real stages."""
    return Setting(tmp_path_factory.mktemp("tiny"), torchrun)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory, torchrun: Callable[..., list[str]]) -> Setting:
    """The tiny setting with four experts in every layer."""
    return Setting(tmp_path_factory.mktemp("moe"), torchrun, MOE_ARCHITECTURE)


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Runs a program under the real torchrun on this machine.

    `torchrun(nproc, target, *args, timeout=600, env=None, cwd=None, expect_failure=False)` runs
    `target` (a script's path, or a module's name) in `nproc` processes and returns what each rank
    printed (stdout, then stderr), in the order of the ranks. It fails the test with the tails of
    the ranks' logs when a rank fails (or, with `expect_failure`, when none does), and when the run
    outlasts `timeout` seconds; nothing it started lives on.
    """

    def run(
        nproc: int,
        target: str | Path,
        *args: object,
        timeout: float = 600,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        expect_failure: bool = False,
    ) -> list[str]:
        logs = tmp_path_factory.mktemp("torchrun")
        program = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
        # --standalone lets the rendezvous pick a free port itself, so that parallel runs never meet
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)),
            *("--redirects", "3", "--log-dir", str(logs), *program, *map(str, args)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        with open(logs / "launcher.log", "wb") as launcher_log:
            launcher = subprocess.Popen(
                command, stdout=launcher_log, stderr=subprocess.STDOUT, env=environment, cwd=cwd
            )
            try:
                code = launcher.wait(timeout)
                outcome = f"ended with exit code {code}"
            except subprocess.TimeoutExpired:
                code, outcome = None, f"did not end within {timeout:g} s"
            finally:
                _stop(launcher)
        outputs = [_output(logs, rank) for rank in range(nproc)]
        if code is None or (code != 0) != expect_failure:
            pytest.fail(_report(outcome, command, outputs, logs), pytrace=False)
        return outputs

    return run


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and its ranks, which run in sessions of their own."""
    import psutil

    if launcher.poll() is not None:
        return
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    for process in [launcher, *ranks]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()


def _output(logs: Path, rank: int) -> str:
    files = sorted(logs.glob(f"*/*/{rank}/stdout.log")) + sorted(
        logs.glob(f"*/*/{rank}/stderr.log")
    )
    return "".join(file.read_text(errors="replace") for file in files)


def _report(outcome: str, command: Sequence[str], outputs: Sequence[str], logs: Path) -> str:
    named = [(f"rank {rank}", text) for rank, text in enumerate(outputs)]
    named.append(("torchrun", (logs / "launcher.log").read_text(errors="replace")))
    tails = [f"--- {name} ---\n" + "\n".join(text.splitlines()[-30:]) for name, text in named]
    return "\n".join([f"{' '.join(command)}\n{outcome}; the last lines of each log:", *tails])
