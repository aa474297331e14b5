"""What befalls processes: they are killed at any moment, or have no room for what they write."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def killed(program: str, *arguments: object) -> Iterator[IO[str]]:
    """Starts a program of Python; yields its output, and kills it after what is done meanwhile."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond this size of a file, in bytes, fail as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
