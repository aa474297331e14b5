"""Trains jobs one after the other, and counts what each computes.

torchrun ... tests/workers/economies_worker.py JOB.json ...

Rank 0 prints a line of JSON per job: calls of the first layer and of its attention's core, within
training and within scoring, and the dtype in which gradients are added up; or why it is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import TrainJob, read_job


def main() -> None:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.core import parallel_state

    from nemo_rod.megatron.train_job import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    class Counter(Callback):
        def __init__(self) -> None:
            self.calls = {f"{what} {when}": 0 for what in ("layer", "core")
                          for when in ("training", "scoring")}  # fmt: skip
            self.gradients = ""

        def on_train_start(self, context: CallbackContext) -> None:
            named = dict(context.model[0].named_modules())
            first = next(m for name, m in named.items() if name.endswith("decoder.layers.0"))
            self._count("layer", first)
            self._count("core", first.self_attention.core_attention)

        def on_train_step_end(self, context: CallbackContext) -> None:
            self.gradients = str(next(context.model[0].parameters()).main_grad.dtype)

        def _count(self, what: str, module: Any) -> None:
            def hook(module: Any, *_: Any) -> None:
                self.calls[f"{what} {'training' if module.training else 'scoring'}"] += 1

            module.register_forward_pre_hook(hook)

    for file in sys.argv[1:]:
        job, counter = read_job(Path(file)), Counter()
        assert isinstance(job, TrainJob)
        try:
            train(job, callbacks=[counter])
            found: dict[str, Any] = {"calls": counter.calls, "gradients": counter.gradients}
        except ValueError as refusal:
            found = {"refused": str(refusal)}
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
