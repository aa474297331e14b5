"""One training job, and how often it beats during each of its validations.

torchrun ... tests/workers/validation_worker.py JOB.json

Every rank prints a line `beats [N, ...]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import TrainJob, read_job


def main() -> None:
    from nemo_rod.megatron.callbacks.validation import Validation
    from nemo_rod.megatron.train_job import train
    from nemo_rod.megatron.watch import Signs

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = read_job(Path(sys.argv[1]))
    assert isinstance(job, TrainJob)
    signs, beats = Signs(), []
    measure = Validation.measure

    def measure_counted(self: Validation, context: Any) -> dict[str, float]:
        before = signs.beats
        losses = measure(self, context)
        beats.append(signs.beats - before)
        return losses

    Validation.measure = measure_counted  # type: ignore[method-assign]
    train(job, signs=signs)
    print("beats", beats)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
