"""What several test files share: reproducible property tests and real processes on gloo."""

import contextlib
import functools
import gc
import importlib.metadata
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from places import TESTS, WORKERS
from tiny import MOE_ARCHITECTURE, Setting, configured

from nemo_rod.run.launch.slurm import render_stage
from nemo_rod.run.processes.torchrun import start
from tests import lanes

_START = time.time()


def pytest_configure(config: pytest.Config) -> None:
    for lane in lanes.LANES:
        if lane.name in lanes.MARKERS:
            config.addinivalue_line("markers", f"{lane.name}: {lane.about} (make {lane.target})")
    config.option.markexpr = config.option.markexpr or lanes.LANES[0].expression
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of xdist's processes, a core for each
    # a full collection of garbage walks through all tests and all of Megatron
    gc.set_threshold(*gc.get_threshold()[:2], 1_000)
    # GPU images may lack Hypothesis. Derandomised, so that a failure in one place is a failure in
    # every place; no deadline, because a shared machine is slow at times.
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("nemo_rod", max_examples=30, derandomize=True, deadline=None)
        settings.load_profile("nemo_rod")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `torchrun` makes takes longest, and under xdist it is for one process to do.

    So are imports of Megatron, which take as long as a hundred other tests. Tests of runs and of
    the project come next, which wait for processes and their clocks: not last, on one core.
    """
    waiting = ("tests/run/", "tests/project/")
    items.sort(key=lambda i: (group(i.nodeid) != "megatron", not i.nodeid.startswith(waiting)))


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together, and so do all that need Megatron."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


def group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "megatron" if _needs_megatron(file) else file


@functools.cache
def _needs_megatron(file: str) -> bool:
    home = r"nemo_rod\.(megatron|cpu|hosts\.swap_in)|megatron\b"
    uses = re.compile(
        r"def \w+\([^)]*\b(torchrun|tiny|moe|small_run)\b|\btrains=True|\brun_process\("
        rf"|(from|import) (nemo_rod\.)?megatron\b|(Later|importorskip)\(.({home})"
    )
    return uses.search((TESTS.parent / file).read_text()) is not None


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
        lanes.record(
            lane, {**counts, "seconds": round(time.time() - _START), "with": versions(lane)}
        )


def versions(lane: lanes.Lane) -> str:
    """What the tests ran on: packages of the lane's checkout, or those that Python finds first."""
    packages = [f"Python {platform.python_version()}"]
    checkouts = (os.environ.get(need.partition("/")[0], "") for need in lane.needs)
    places = [*filter(None, checkouts), *sys.path]
    for package in ("megatron/bridge", "megatron/core", "nemo_rl"):
        files = (Path(place, package, "package_info.py") for place in places)
        if file := next(filter(Path.is_file, files), None):
            version = runpy.run_path(str(file))["__version__"].partition("+")[0]
            packages.append(f"{package.replace('/', '-')} {version}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        packages.append(f"transformers {importlib.metadata.version('transformers')}")
    return ", ".join(packages)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory):
    """No process and no temporary file outlives the tests that started it, in any lane.

    Processes are known by the folder of temporary files, which they inherit.
    """
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", tempfile.gettempdir())  # that of this process stays
        patch.setenv("TMPDIR", str(folder))
        yield
    forkserver._forkserver._stop()  # which removes what its imports made
    end = time.monotonic() + 30  # those that were told to end may still be at it
    while (left := [*_processes_of(folder)]) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left, "processes are left:\n" + "\n".join(left)
    # of this process, or its libraries; wandb's and torchrun's, of a process that a test has killed
    kept = re.compile(
        r"pymp-|torchinductor_|pytorch-errorfile-|wandb(-|_xpu-)|tmp\w+wandb-(media|artifacts)$"
    )
    paths = [
        path
        for path in folder.iterdir()
        if not kept.match(path.name) and not any(path.glob("*/attempt_*"))
    ]
    files = [
        str(file.relative_to(folder))
        for path in paths
        for file in [path, *path.rglob("*")]
        # torchrun leaves folders where a test, as a user's own job, is started by it
        if not (path.name.startswith("torchelastic_") and file.is_dir())
    ]
    assert not files, f"files or folders are left in TMPDIR: {files[:20]}"


def _processes_of(folder: Path) -> Iterator[str]:
    """Commands of the processes that were started with a folder of temporary files."""
    import psutil

    for process in psutil.process_iter(["ppid", "cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or ())
        # servers of this process, which end with it
        is_helper = re.search("from multiprocessing.|helpers/commands.py$", command) is not None
        is_helper &= process.info["ppid"] == os.getpid()
        if (process.info["environ"] or {}).get("TMPDIR") == str(folder) and not is_helper:
            yield f"{process.pid} {command[-200:]}"


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    """A finished run of made-up numbers, for tests that leave it as it is."""
    from made_up_run import make_run

    run_dir = tmp_path_factory.mktemp("made") / "run"
    make_run(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder that the example package of docs/extending.md is installed into."""
    import modules_logger
    from tiny_recipe import EXAMPLE

    folder = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, EXAMPLE], check=True)
    modules_logger.install(folder)
    return folder


@pytest.fixture(scope="session")
def small_run(installed, tmp_path_factory):
    """The folder of a run with all that `tiny_recipe.py` tells, which stays as it is."""
    from command_line import nemo_rod
    from tiny_recipe import WHOLE, write_rows

    cwd = tmp_path_factory.mktemp("small")
    write_rows(cwd / "new.csv")
    done = nemo_rod("run", *WHOLE, cwd=cwd, packages=installed, trains=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return cwd / "run"


@pytest.fixture
def run_dir(made_run, tmp_path):
    """A copy of it, for tests that change it."""
    return Path(shutil.copytree(made_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def no_pictures(monkeypatch):
    """Reports without SVG and PNG, which take most of their time."""
    monkeypatch.setattr("nemo_rod.lab.report.figures.drawing.converting", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, torchrun):
    """A store, a base, a specialist and both references, made by the real stages."""
    return Setting(tmp_path_factory.mktemp("tiny"), torchrun)


@pytest.fixture(scope="session")
def moe(tmp_path_factory, torchrun):
    """The tiny setting with four experts in every layer."""
    return Setting(tmp_path_factory.mktemp("moe"), torchrun, MOE_ARCHITECTURE)


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Runs a program under torchrun on this machine, as a stage's job is run.

    `torchrun(nproc, target, *args, timeout=600, env=None, cwd=None, expect_failure=False)` runs
    `target` (a script's path, or a module's name) in `nproc` processes and returns what each rank
    printed (stdout, then stderr), in the order of the ranks; with 0 processes it runs it alone,
    without torchrun. It fails the test with the tails of the ranks' logs when a rank fails (or,
    with `expect_failure`, when none does), and when the run outlasts `timeout` seconds; nothing it
    started lives on.

    The processes are forks of one that has imported Megatron, where there is no GPU. With
    `fresh=True` they import for themselves, for what changes imports or must be without them. More
    than PER_NODE of the environment are on as many nodes of this Slurm job, started as a stage is.
    """

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
        program, environment = Path(target), {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        if program.suffix == ".py":
            path = [str(program.parent), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(path)
        per_node = min(nproc, int(os.environ.get("PER_NODE", nproc)))
        module = program.stem if program.suffix == ".py" else str(target)
        arguments = [module, *map(str, args)]
        if nproc:
            options = (f"--nproc-per-node={per_node}", "--redirects=3", f"--log-dir={logs}", "-m")
            arguments = [*options, *arguments]
        if nproc > per_node:
            on_node = shlex.join([sys.executable, str(WORKERS / "on_node.py"), *arguments])
            (logs / "stage.sh").write_text(
                f"command=({on_node})\nrecord={logs}/record\n" + render_stage(configured())
            )
            command, fresh = ["bash", str(logs / "stage.sh")], True
        else:
            # --standalone lets the rendezvous pick a free port, so that parallel runs never meet
            alone = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
            command = [sys.executable, "-P", "-m", *(alone if nproc else ()), *arguments]
        with open(logs / "launcher.log", "w") as log, contextlib.chdir(cwd or Path.cwd()):
            output = {"stdout": log, "stderr": log, "env": environment}
            launcher = subprocess.Popen(command, **output) if fresh else start(command, environment)
        try:
            ended = f"ended with exit code {launcher.wait(timeout)}"
            failed = launcher.returncode != 0
        except subprocess.TimeoutExpired:
            ended, failed = f"did not end within {timeout:g} s", None
        except pytest.fail.Exception as interrupted:  # the test's own limit, by pytest-timeout
            ended, failed = f"had not ended: {interrupted.msg}", None
        finally:
            _kill(launcher.pid)
            launcher.wait()
        outputs = [_output(logs, rank) for rank in range(nproc)]
        if failed is not expect_failure:
            if launcher.stdout is not None:
                (logs / "launcher.log").write_text(launcher.stdout.read())
            pytest.fail(_report(ended, command, outputs, logs), pytrace=False)
        return outputs

    return run


def _kill(pid: int) -> None:
    """Kills a launcher that still runs, and its ranks, which may have sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _output(logs: Path, rank: int) -> str:
    files = sorted(logs.glob(f"*/*/{rank}/stdout.log")) + sorted(
        logs.glob(f"*/*/{rank}/stderr.log")
    )
    return "".join(file.read_text(errors="replace") for file in files)


def _report(outcome: str, command: Sequence[str], outputs: Sequence[str], logs: Path) -> str:
    named = [(f"rank {rank}", text) for rank, text in enumerate(outputs)]
    named.append(("torchrun", (logs / "launcher.log").read_text(errors="replace")))
    tails = [f"--- {name} ---\n" + "\n".join(text.splitlines()[-40:]) for name, text in named]
    return "\n".join([f"{' '.join(command)}\n{outcome}; the last lines of each log:", *tails])
