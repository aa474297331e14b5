"""Runs one training job and writes the weights that every step starts from.

torchrun ... tests/workers/layouts_worker.py JOB.json WEIGHTS_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import TrainJob, read_job


def main() -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback, CallbackContext

    from nemo_rod.megatron.train_job import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = read_job(Path(sys.argv[1]))
    assert isinstance(job, TrainJob)
    bridge = AutoBridge.from_hf_pretrained(job.model)

    class SaveWeights(Callback):
        def on_train_step_start(self, context: CallbackContext) -> None:
            folder = Path(sys.argv[2]) / str(context.state.train_state.step)
            bridge.save_hf_pretrained(context.model, folder, show_progress=False)

    train(job, callbacks=[SaveWeights()] if len(sys.argv) > 2 else [])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
