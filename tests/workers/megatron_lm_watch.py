"""Imported by the lines that the tests add to `pretrain_gpt.py`: notes what its job does."""

from typing import Any

from job_notes import note_step


def watch(out: str, die_at: int | None = None) -> None:
    """Lets the job write loss and gradient norm of every step, from 0, to `OUT/steps.jsonl`."""
    from megatron.training import get_args, training
    from torch import distributed as dist

    train_step = training.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result, row = train_step(*args, **kwargs), None
        if dist.get_rank() == dist.get_world_size() - 1:
            row = {"loss": float(result[0]["lm loss"]), "grad_norm": float(result[5])}
        note_step(out, row, step=get_args().curr_iteration, die_at=die_at)
        return result

    training.train_step = watched
