"""What a fork server of jobs imports at its start; named to it by `start.py`."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

MODULES = ("torch.distributed.run", "nemo_rod.megatron.train_job", "nemo_rod.megatron.forward_jobs")

# The server's output is its command's: warnings of imports belong there as little as in a log.
with open(os.devnull, "w") as nowhere:
    for standard in (1, 2):
        os.dup2(nowhere.fileno(), standard)

for module in MODULES:
    with suppress(Exception):  # the job that needs it imports it again, and says why it cannot
        import_module(module)
