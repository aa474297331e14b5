"""Runs `nemo-rod` in forks of a process that has imported it, whose import takes a second.

Each line of standard input is a command, as JSON: its words, the files for its output, its folder
and its environment. Its exit code is printed.
"""

from __future__ import annotations

import json
import os
import sys

from nemo_rod import cli
from nemo_rod.commands import recipes  # noqa: F401 - its imports take half a second


def main() -> None:
    for line in sys.stdin:
        words, files, folder, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            for descriptor, file in enumerate([os.devnull, *files]):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            sys.argv = [cli.__file__, *words]
            return cli.main()  # and this process ends as any program does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
