"""Builds a model as training would, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from nemo_rod.corpus.store import BlockStore
from nemo_rod.files import write_json
from nemo_rod.jobs import CheckJob
from nemo_rod.megatron.models import model_provider
from nemo_rod.megatron.ranks import is_recorder
from nemo_rod.upstream import functions


def check_model(job: CheckJob) -> None:
    """Builds the model in its layout and writes `model.json`: what every rank has and trains.

    Raises:
        ValueError: the model does not support the layout, its checkpoint cannot be loaded, or it
            would also be trained by another loss than that of the next token (`objective`).
    """
    functions.check("scoring", "trainer")
    _, provider = model_provider(
        job.model,
        job.parallel,
        precision=job.precision,
        block_size=BlockStore(job.blocks).block_size,
        trust_remote_code=job.trust_remote_code,
    )
    provider.finalize()
    provider.initialize_model_parallel(seed=job.seed)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    mine = {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if is_recorder():
        found = {"provider": type(provider).__name__, "ranks": everyone}
        write_json(Path(job.out) / "model.json", found)
    del chunks, parameters
    parallel_state.destroy_model_parallel()
