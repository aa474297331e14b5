"""Runs jobs one after the other in the same processes, which have to import Megatron once.

    torchrun ... tests/workers/jobs_worker.py [--weights=FOLDER] [--count] FILE.json ...

FILE is a job, or a list of job files in which the arguments of `merge_checkpoints` may stand for
one. With `--weights`, the weights that every step of a training job starts from are written to
FOLDER/STEP. With `--count`, every rank prints a line of JSON per training job: calls of the first
layer and of its attention's core within training and within scoring, the dtype in which gradients
are added up, and beats during each validation; or why the job is refused. A job with adapters
leaves those that it begins with in adapters_RANK.pt.
"""

import argparse
import gc
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import EvaluateJob, ReferenceJob, TrainJob, read_job
from nemo_rod.lab.merging import merge_checkpoints


def main() -> None:
    from nemo_rod.megatron.forward_jobs import evaluate, reference

    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds: dict[type, Any] = {ReferenceJob: reference, EvaluateJob: evaluate}
    kinds[TrainJob] = lambda job: train(job, options.weights, count=options.count)
    steps: list[Any] = []
    for file in options.files:
        content = json.loads(file.read_text())
        steps += content if isinstance(content, list) else [file]
    for step in steps:
        if isinstance(step, str | Path):
            job = read_job(Path(step))
            kinds[type(job)](job)
        elif dist.get_rank() == 0:
            merge_checkpoints(*step)
        free_groups()
    dist.destroy_process_group()


def free_groups() -> None:
    """Ends the groups of a model; each has threads that would wake every 10 ms. Collective."""
    from megatron.core import parallel_state

    dist.barrier()
    if parallel_state.is_initialized():  # training ends it by itself
        parallel_state.destroy_model_parallel()
    for group in [group for group in _world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()


def train(job: TrainJob, weights: Path | None, *, count: bool) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback, CallbackContext

    from nemo_rod.megatron import train_job
    from nemo_rod.megatron.callbacks.validation import Validation
    from nemo_rod.megatron.watch import Heartbeat

    class SaveWeights(Callback):
        def __init__(self) -> None:
            self.bridge = AutoBridge.from_hf_pretrained(job.start)

        def on_train_step_start(self, context: CallbackContext) -> None:
            folder = weights / str(context.state.train_state.step)
            self.bridge.save_hf_pretrained(context.model, folder, show_progress=False)

    class SaveAdapters(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            named = context.model[0].module.named_parameters()
            trained = {name: w.detach().clone() for name, w in named if w.requires_grad}
            torch.save(trained, Path(job.out) / f"adapters_{dist.get_rank()}.pt")

    class Counter(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            named = dict(context.model[0].named_modules())
            first = next(m for name, m in named.items() if name.endswith("decoder.layers.0"))
            for part, module in (("layer", first), ("core", first.self_attention.core_attention)):
                for mode in ("training", "scoring"):
                    calls[f"{part} {mode}"] = 0

                def hook(module: Any, *_: Any, part: str = part) -> None:
                    calls[f"{part} {'training' if module.training else 'scoring'}"] += 1

                module.register_forward_pre_hook(hook)

        def on_train_step_end(self, context: CallbackContext) -> None:
            results["gradients"] = str(next(context.model[0].parameters()).main_grad.dtype)

    def counted(self: Validation, context: Any) -> dict[str, float]:
        before = heartbeat.beats
        losses = measure(self, context)
        beats.append(heartbeat.beats - before)
        return losses

    calls, beats, measure, heartbeat = {}, [], Validation.measure, Heartbeat()
    results: dict[str, Any] = {"calls": calls, "beats": beats}
    callbacks = [*([SaveWeights()] if weights else []), *([Counter()] if count else [])]
    callbacks += [SaveAdapters()] if "lora" in job.config.train.terms else []
    with patch.object(Validation, "measure", counted):
        try:
            train_job.train(job, callbacks=callbacks, heartbeat=heartbeat)
        except ValueError as refusal:
            if not count:
                raise
            results = {"refused": str(refusal)}
    if count:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
