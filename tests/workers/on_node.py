"""One node's torchrun of a job on several, which meets the others as a stage's does.

on_node.py OPTIONS -m MODULE ARGUMENTS
"""

import os
import sys

from nemo_rod.run.processes.nodes import Nodes

if __name__ == "__main__":
    nodes = Nodes.from_environment()
    torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes.torchrun_options()]
    os.execve(sys.executable, [*torchrun, *sys.argv[1:]], {**os.environ, **nodes.environment()})
