"""Calls to all workers that end promptly and name the cause when one of them fails."""

from __future__ import annotations

import time
from typing import Any

GRACE_SECONDS = 5.0  # time for the other workers to report, once one has failed
SETUP_SECONDS = 600.0  # minimum time limit of the first call, in which workers still import


class WorkerFailed(RuntimeError):
    """A worker raised, died or stalled; the message says which rank and why."""


def call_all(policy: Any, method: str, *, stall_seconds: float, **arguments: Any) -> list[Any]:
    """Runs a method on every worker and returns the results by rank.

    Args:
        policy: NeMo-RL's policy.
        method: name of a method of the worker class.
        stall_seconds: maximum wait for an answer; 0 for no limit.
        arguments: arguments of the method, the same on every rank.

    Raises:
        WorkerFailed: a worker failed; raised at once, although others may wait for it forever.
    """
    import ray

    futures = policy.worker_group.run_all_workers_single_data(method, **arguments)
    ranks = {future: rank for rank, future in enumerate(futures)}
    pending, failures = list(futures), dict[int, Exception]()
    deadline = time.monotonic() + stall_seconds if stall_seconds else None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            if not failures:
                waiting = ", ".join(str(ranks[future]) for future in pending)
                raise WorkerFailed(
                    f"{method}: no answer of rank {waiting} for {stall_seconds:g} s "
                    "(rod.stall_seconds)"
                )
            break
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            failures.setdefault(ranks[done[0]], error)
            limit = time.monotonic() + GRACE_SECONDS
            deadline = limit if len(failures) == 1 or deadline is None else min(deadline, limit)
    if failures:
        rank, why = _cause(failures)
        raise WorkerFailed(f"rank {rank}: {sentence(why)}") from why
    return ray.get(futures)


def _cause(failures: dict[int, Exception]) -> tuple[int, Exception]:
    """Returns the likeliest cause: first a rank that died, then one that refused something."""
    from ray.exceptions import RayActorError

    def order(item: tuple[int, Exception]) -> int:
        if isinstance(item[1], RayActorError):
            return 0
        cause = getattr(item[1], "cause", None)
        echo = isinstance(cause, RuntimeError) and "onnection" in str(cause)
        return 3 if echo else 1 if isinstance(cause, ValueError) else 2

    return min(failures.items(), key=order)


def sentence(error: Exception) -> str:
    """Returns the message of a failed call, without Ray's and Python's traceback."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "creation task" in lines[0]:  # a traceback that ends with the error
            return f"could not start: {lines[-1]}"
        return f"its process died ({' '.join(lines)[:300]})"
    cause = getattr(error, "cause", None) or error
    what = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
    return what + " ".join(str(cause).split())
