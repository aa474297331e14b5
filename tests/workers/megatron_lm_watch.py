"""Imported by the lines that the tests add to `pretrain_gpt.py`: notes what its job does."""

import json
import os
import signal
from pathlib import Path
from typing import Any


def watch(out: str, die_at: int | None = None) -> None:
    """Lets the job write loss and gradient norm of every step to `OUT/steps.jsonl`.

    Args:
        out: the folder.
        die_at: the step, from 0, after which the process kills itself.
    """
    from megatron.training import get_args, training
    from torch import distributed as dist

    train_step = training.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        step = get_args().curr_iteration
        if dist.get_rank() == dist.get_world_size() - 1:
            row = {"step": step, "loss": float(result[0]["lm loss"]), "grad_norm": float(result[5])}
            Path(out).mkdir(parents=True, exist_ok=True)
            with open(Path(out) / "steps.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    training.train_step = watched
