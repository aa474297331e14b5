"""One process of a job: `torchrun ... -m nemo_rod.megatron JOB.json`."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from nemo_rod.installation import clash
from nemo_rod.jobs import STORE, EvaluateJob, ExportJob, Job, ReferenceJob, TrainJob, shared_job
from nemo_rod.megatron.watch import Watch
from nemo_rod.signals import (
    STOP_SIGNALS,
    Stopped,
    end_with_parent,
    keep_signals_from_helpers,
    name_process,
)

# kind of job -> the module that runs it, and its function
_RUN_BY = {
    TrainJob: ("train_job", "train"),
    ReferenceJob: ("forward_jobs", "reference"),
    EvaluateJob: ("forward_jobs", "evaluate"),
    ExportJob: ("forward_jobs", "export"),
}


def main() -> int:
    """Runs the job named on the command line; returns the exit status of this rank."""
    end_with_parent()
    name_process(f"rod rank {os.environ['RANK']}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for number in STOP_SIGNALS:  # the trainer handles only SIGTERM
        if number != signal.SIGTERM:
            signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    keep_signals_from_helpers()
    watch = Watch.for_this_job()
    watch.start()
    try:
        job = shared_job(watch.store, sys.argv[1:])
        watch.stall_seconds = job.stall_seconds
        _run(job, watch)
    except Stopped as stop:
        print(f"nemo-rod stopped: {stop}", flush=True)
        # torchrun ends all ranks with the first one: the last may still be closing its loggers
        dist.barrier()
        watch.close()
        return Stopped.exit_status
    except BaseException as error:  # every rank must end, whatever the error
        traceback.print_exc()
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        sentence = kind + " ".join(str(error).split())
        if isinstance(error, ImportError) and (why := clash("megatron-bridge", "transformers")):
            sentence += f": {why}"
        if kind:  # may only follow from another rank's death: let its torchrun find that one first
            time.sleep(15 if STORE in os.environ else 2)
        print(f"nemo-rod error on rank {watch.rank}: {sentence}", flush=True)
        watch.fail(sentence)
        return 1
    watch.close()
    dist.destroy_process_group()
    return 0


def _run(job: Job, watch: Watch) -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(minutes=job.collective_minutes)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    module, function = _RUN_BY[type(job)]
    getattr(importlib.import_module(f"nemo_rod.megatron.{module}"), function)(job, heartbeat=watch)
    dist.barrier()


if __name__ == "__main__":
    status = main()
    for helper in multiprocessing.active_children():
        helper.kill()  # it ignores signals that ask it to end
    if status:
        # A normal exit could hang: other ranks, or the interpreter's cleanup, may be waiting in a
        # collective.
        for child in psutil.Process().children(recursive=True):  # helpers of the checkpoint writer
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
