"""Runs `nemo-rod` in forks of a process that has imported it, whose import takes a second.

Each line of standard input is a command, as JSON: its words, the files for its output, its folder,
its environment, and the server of forks of the process that asks. Its exit code is printed.
"""

import gc
import json
import os
import sys
from multiprocessing import forkserver

from nemo_rod import cli
from nemo_rod.commands import recipes  # noqa: F401 - its imports take half a second
from nemo_rod.cpu import forks
from nemo_rod.lab.composing import compose_config
from nemo_rod.run.stages import Stages


def main() -> None:
    Stages(compose_config("recipe=toy_synthetic")).all()  # imports half of what a command needs
    gc.freeze()  # as in `nemo_rod.cpu.preloaded`
    for line in sys.stdin:
        words, files, folder, environment, server = json.loads(line)
        child = os.fork()
        if child == 0:
            for descriptor, file in enumerate([os.devnull, *files]):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            if server is not None:
                use(*server)
            sys.argv = [cli.__file__, *words]
            return cli.main()  # and this process ends as any program does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def use(address: str, variables: list[str]) -> None:
    """Lets this process fork from another's server, which has imported NVIDIA's stack already."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = lambda: None
    forks._environment_of_server = lambda: dict.fromkeys(variables)
    del sys.modules["__main__"].__file__  # which every fork would import


if __name__ == "__main__":
    main()
