"""One process of a job: `torchrun ... -m nemo_rod.megatron JOB.json`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rod.jobs import EvaluateJob, ScoreJob, TrainJob, end_with_parent, read_job


def main() -> None:
    """Runs the job that the command line names."""
    end_with_parent()
    job = read_job(Path(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if isinstance(job, TrainJob):
        from nemo_rod.megatron.trainer import train

        train(job)
    elif isinstance(job, ScoreJob):
        from nemo_rod.megatron.scorer import score

        score(job)
    else:
        assert isinstance(job, EvaluateJob)
        from nemo_rod.megatron.scorer import evaluate

        evaluate(job)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # whatever it is, every rank must end
        traceback.print_exc()
        if isinstance(error, ValueError):
            sentence = " ".join(str(error).split())
            print(f"nemo-rod error on rank {os.environ.get('RANK', 0)}: {sentence}", flush=True)
        # The other ranks may wait in a collective: leave at once, and torchrun ends them.
        sys.stdout.flush()
        os._exit(1)
