"""Builds a model as training would, before anything is trained."""

from __future__ import annotations

from pathlib import Path

from megatron.core import parallel_state

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.jobs import CheckJob
from nemo_rod.megatron.models import build
from nemo_rod.megatron.ranks import is_recorder, of_any_rank
from nemo_rod.megatron.watch import UNWATCHED, Signs


def check_model(job: CheckJob, signs: Signs = UNWATCHED) -> None:
    """Builds the model in its layout and writes `model.json`: what every rank has and trains.

    Raises:
        ValueError: the model does not support the layout, its checkpoint cannot be loaded, or it
            would also be trained by another loss than that of the next token (`objective`).
    """
    _, chunks = build(job, job.model, BlockStore(job.blocks).block_size)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    mine = {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }
    everyone = of_any_rank([mine])
    if is_recorder():
        write_json(Path(job.out) / "model.json", {"ranks": everyone})
    del chunks, parameters
    parallel_state.destroy_model_parallel()
