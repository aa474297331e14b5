"""Runs jobs one after the other in the same processes, which have to import Megatron once.

torchrun ... tests/workers/jobs_worker.py STEPS.json

STEPS is a list of job files; in place of one may stand the arguments of `merge_checkpoints`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import EvaluateJob, ReferenceJob, TrainJob, read_job
from nemo_rod.lab.tasks import merge_checkpoints


def run(file: Path) -> None:
    from megatron.core import parallel_state

    from nemo_rod.megatron.forward_jobs import evaluate, reference
    from nemo_rod.megatron.train_job import train

    kinds: dict[type, Any] = {TrainJob: train, ReferenceJob: reference, EvaluateJob: evaluate}
    job = read_job(file)
    kinds[type(job)](job)
    dist.barrier()
    if parallel_state.is_initialized():  # training ends it by itself
        parallel_state.destroy_model_parallel()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for step in json.loads(Path(sys.argv[1]).read_text()):
        if isinstance(step, str):
            run(Path(step))
        elif dist.get_rank() == 0:
            merge_checkpoints(*step)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
