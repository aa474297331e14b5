"""NeMo-RL's own loop over a job's blocks, without the selector: stock.py JOB.json SECTION.

Prints loss, gradient norm and seconds of `Policy.train` for every step.
"""

import json
import sys
import time
from pathlib import Path

import torch
from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import init_ray

from nemo_rod.corpus import BlockStore
from nemo_rod.hosts.nemo_rl import policy, settings, worker
from nemo_rod.jobs import read_job
from nemo_rod.signals import leave_ray

if __name__ == "__main__":
    init_ray()
    job = read_job(Path(sys.argv[1]))
    store = BlockStore(job.blocks)
    policy.Workers.call = lambda *_, **__: None  # the workers stay as NeMo-RL starts them
    with policy.using_workers(settings.resolve_job(job, json.loads(sys.argv[2])), job) as workers:
        for step in range(job.config.train.steps):
            tokens = torch.from_numpy(store.tokens(job.arm.candidates.pool(step).block_ids)).long()
            begin, batch = time.perf_counter(), worker.train_batch([tokens])
            result = workers.policy.train(BatchedDataDict(batch), NLLLossFn())
            row = {key: float(result[key].mean()) for key in ("loss", "grad_norm")}
            print(json.dumps({**row, "seconds": time.perf_counter() - begin}), flush=True)
    leave_ray(0)
