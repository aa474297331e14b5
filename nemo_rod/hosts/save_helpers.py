"""Processes that Megatron starts to write checkpoints, made to end with the rank they belong to.

A rank that is killed leaves them behind otherwise, each with all imports of its program: the server
of the queue of results, and, with asynchronous saving, the writer.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
from multiprocessing.managers import SyncManager
from typing import Any

from nemo_rod.signals import end_with_parent


def end_with_rank() -> None:
    """Makes helpers that this process starts from now on end when it does, however it ends."""
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    for name in ("get_write_results_queue", "_get_write_results_queue"):  # until core 0.16
        if theirs := getattr(filesystem_async, name, None):  # its signature is checked again
            ours = functools.wraps(theirs)(lambda mp_mode="spawn": _results_queue(mp_mode))
            setattr(filesystem_async, name, ours)
    writer = getattr(async_utils, "PersistentAsyncCaller", None)
    if writer is not None:
        writer.async_loop = staticmethod(_async_loop)


@functools.cache
def _results_queue(mp_mode: str = "spawn") -> Any:
    manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
    manager.start(end_with_parent, (signal.SIGKILL,))
    return manager.Queue()


def _async_loop(*args: Any) -> None:
    """Runs Megatron's own loop, in the process that it is started for."""
    end_with_parent(signal.SIGKILL)
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop(*args)
