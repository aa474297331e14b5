"""Commands, and recipes as the command line composes them."""

import copy
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

from places import TESTS

from nemo_rod.config import Config
from nemo_rod.cpu import forks
from nemo_rod.installation import config_folder
from nemo_rod.lab import composing
from nemo_rod.run.processes.pythons import sees_gpu

RECIPES = sorted(file.stem for file in (config_folder() / "recipe").glob("*.yaml"))
OF_THE_PAPER = [name for name in RECIPES if not ("toy" in name or "smollm2" in name)]


def composed(*overrides: str) -> Config:
    """Composed once for all folders of a run, which no other key refers to."""
    folders = [word for word in overrides if re.fullmatch(r"run_dir=[\w./-]+", word)]
    config = copy.deepcopy(_composed(*(word for word in overrides if word not in folders)))
    for word in folders:
        config.run_dir = word.partition("=")[2]
    return config


_composed = functools.cache(composing.compose_config)


def nemo_rod(
    *arguments: object,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    packages: Path | None = None,
    trains: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a fork of a process that has imported nemo_rod (`commands.py`).

    With an environment of its own it is a new process. `packages` is a folder of further ones that
    the first process has imported, too. Of one that trains, the processes are forks of the same
    process as those of the fixture `torchrun`.
    """
    words = [str(argument) for argument in arguments]
    if env is not None:
        command = [sys.executable, "-m", "nemo_rod", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        environment = with_packages(packages)
        where = [*map(str, files)], str(cwd or Path.cwd()), environment
        request = words, *where, server_of_forks() if trains else None
        server = _server(packages)
        try:
            print(json.dumps(request), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
        except BaseException:  # the test's time is over, say
            _server.cache_clear()
            server.kill()
            raise
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


def here(*arguments: object) -> None:
    """Runs a command of paths in this process, where a refusal is an exception."""
    from nemo_rod.cli import path_parser

    options = path_parser(str(arguments[0])).parse_args([str(word) for word in arguments])
    options.main(options)


@functools.cache
def server_of_forks() -> tuple[str, list[str]] | None:
    """The address of this process's server of forks, and the names of its variables.

    None with a GPU, where every process imports for itself.
    """
    if sees_gpu():
        return None
    forks.Fork(["nemo_rod.signals"], os.environ).wait()  # begins with the first
    return forkserver._forkserver._forkserver_address, list(forks._environment_of_server())


def with_packages(folder: Path | None) -> dict[str, str]:
    """The environment of a process that also finds the packages in a folder."""
    if folder is None:
        return dict(os.environ)
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@functools.cache
def _server(packages: Path | None) -> subprocess.Popen[str]:
    """Ends with this process, whose end closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-P", str(TESTS / "helpers" / "commands.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=with_packages(packages),
    )  # fmt: skip
