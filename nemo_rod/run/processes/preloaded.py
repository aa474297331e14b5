"""Imports of the fork server of jobs at its start, where `start.py` names this module."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module

MODULES = ("torch.distributed.run", "nemo_rod.megatron.train_job", "nemo_rod.megatron.forward_jobs")

# Warnings of imports do not belong in the output of the command, which the server inherits.
with open(os.devnull, "w") as nowhere:
    for standard in (1, 2):
        os.dup2(nowhere.fileno(), standard)

for module in MODULES:
    with suppress(Exception):  # a job that needs it imports it again and reports the error
        import_module(module)
