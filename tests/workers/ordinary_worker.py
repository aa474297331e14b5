"""One training job, with the selector or without: there must be no difference.

torchrun ... tests/workers/ordinary_worker.py rod|ordinary JOB.json CHANGES.json OUT

`rod` trains RoD as it is. `ordinary` trains with Megatron-Bridge's own `train_step` and nothing of
ours in it, on an iterator over the blocks that the curriculum in the job's folder chose. Every rank
writes its final state to OUT and, in `rod`, the parts of it that scoring changed.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.jobs import TrainJob, read_job

MODE, JOB, CHANGES, OUT = sys.argv[1:]


def state_beside_weights(context: Any) -> dict[str, Any]:
    """Whatever a forward pass might leave a trace in."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.utils import get_model_config

    model, state = context.model, context.state
    config, rerun = get_model_config(model[0]), get_rerun_state_machine()
    return {
        "random state": torch.get_rng_state(),
        "tensor-parallel random states": get_cuda_rng_tracker().get_states(),
        "buffers": [dict(chunk.named_buffers()) for chunk in model],
        "gradients": [p.main_grad for chunk in model for p in chunk.parameters()],
        "losses of routers": get_moe_layer_wise_logging_tracker(),
        "losses of multi-token prediction": MTPLossLoggingHelper.tracker,
        "timers": {name: (t._elapsed, t._active_time) for name, t in state.timers._timers.items()},
        "rerun machine": (str(rerun.state), rerun.current_iteration, rerun.validation_counts),
        "counters": state.train_state.state_dict(),
        "modes": [module.training for chunk in model for module in chunk.modules()],
        "settings": {k: v for k, v in vars(config).items() if not callable(v)},
        "hooks of the schedule": [config.timers, config.no_sync_func, config.param_sync_func],
        "queued weight gradients": [
            len(getattr(m, "embedding_activation_buffer", None) or ())
            for c in model
            for m in c.modules()
        ],
    }


def snapshot(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return [*map(snapshot, value)] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


def main() -> None:
    from megatron.bridge.models.conversion import model_bridge
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core import rerun_state_machine
    from megatron.core.models.gpt import gpt_layer_specs

    from nemo_rod.corpus import BlockStore
    from nemo_rod.megatron import models
    from nemo_rod.megatron import rod_selector as selector
    from nemo_rod.megatron import train_job as trainer
    from nemo_rod.megatron.batches import micro_batches
    from nemo_rod.selection import Curriculum
    from nemo_rod.selection.selector import Selector

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    job = read_job(Path(JOB))
    assert isinstance(job, TrainJob)
    changes = json.loads(Path(CHANGES).read_text())
    if "mtp_num_layers" in changes.get("model", {}):
        models.refuse_gaps = lambda *_: None  # the tiny base has no such head: it begins at random
        models.refuse_other_losses = lambda model: model  # jobs of others may have one
    out: dict[str, Any] = {"changed by scoring": [], "metrics": []}
    context_now: list[CallbackContext] = []

    class Watcher(Callback):
        def on_train_step_start(self, context: CallbackContext) -> None:
            context_now[:] = [context]

        def on_train_step_end(self, context: CallbackContext) -> None:
            loss = (context.loss_dict or {}).get("lm loss")
            out["metrics"].append((None if loss is None else float(loss), context.grad_norm))

        def on_train_end(self, context: CallbackContext) -> None:
            state = state_beside_weights(context)
            optimizers = getattr(context.optimizer, "chained_optimizers", [context.optimizer])
            end = {
                "weights": [dict(chunk.named_parameters()) for chunk in context.model],
                "optimizer": [list(one.optimizer.state.values()) for one in optimizers],
                "random": [state["random state"], state["tensor-parallel random states"]],
                "buffers": state["buffers"],
            }
            out["end"] = snapshot(end)
            torch.save(out, Path(OUT) / f"{MODE}_{dist.get_rank()}.pt")

    class NoRecorder(Callback):
        """Stands where the recorder does: nothing was chosen, so nothing is recorded."""

        def on_choice(self, choice: Any) -> None: ...
        def on_step(self, choice: Any, seconds: float) -> None: ...

    @dataclass
    class Winners(DatasetProvider):
        """The chosen blocks of a curriculum, in order, as any data loader would give them."""

        seq_length: int = 0

        def build_datasets(self, context: DatasetBuildContext) -> tuple:
            return self.batches(), None, None

        def batches(self) -> Iterator[dict[str, torch.Tensor]]:
            groups = get_pg_collection(context_now[0].model[0])
            size, store = job.config.train.micro_batch_size, BlockStore(job.blocks)
            for record in Curriculum.open(Path(job.out) / "curriculum.rod", read_only=True):
                dealt = record.block_ids[record.chosen].reshape(-1, size)
                share = dealt[groups.dp.rank() :: groups.dp.size()].ravel()
                yield from micro_batches(store, share, size)

    build_provider, build_config = trainer.model_provider, trainer.bridge_config

    def changed_provider(*args: Any, **kwargs: Any) -> tuple:
        bridge, provider = build_provider(*args, **kwargs)
        for name, value in changes["model"].items():
            setattr(provider, name, value)
        return bridge, provider

    def changed_config(*args: Any) -> Any:
        config = build_config(*args)
        config.logger.timing_log_level = 2
        for section in ("ddp", "rerun_state_machine"):
            for name, value in changes.get(section, {}).items():
                setattr(getattr(config, section), name, value)
        if MODE == "ordinary":
            options = {"dataloader_type": "external", "num_workers": 0, "pin_memory": False}
            config.dataset = Winners(seq_length=config.dataset.seq_length, **options)
        return config

    # parts that the changes add to the model are not in the checkpoint and keep their first values
    bridge_class = model_bridge.MegatronModelBridge
    tasks = bridge_class.build_conversion_tasks
    bridge_class.build_conversion_tasks = lambda *args: [t for t in tasks(*args) if t is not None]
    # Bridge asks for TransformerEngine in multi-token prediction whatever the other layers are of
    mtp_spec = gpt_layer_specs.get_gpt_mtp_block_spec
    gpt_layer_specs.get_gpt_mtp_block_spec = lambda config, spec, **options: mtp_spec(
        config, spec, **{**options, "use_transformer_engine": False}
    )
    # upstream's own report fails on a missing attribute, with the selector and without
    rerun_state_machine.RerunStateMachine._maybe_report_stats = lambda _: None
    choose = Selector.choose

    def choose_watched(self: Selector, step: int, scorer: Any) -> Any:
        before = snapshot(state_beside_weights(context_now[0]))
        choice = choose(self, step, scorer)
        after = state_beside_weights(context_now[0])
        out["changed by scoring"] += [key for key in before if not same(before[key], after[key])]
        return choice

    trainer.model_provider, trainer.bridge_config = changed_provider, changed_config
    trainer._Exporter.on_train_end = lambda *_: None
    if MODE == "ordinary":
        selector.RoDSelector.installed = lambda self: nullcontext()
        trainer.Recorder = lambda *_, **__: NoRecorder()
    else:
        Selector.choose = choose_watched
    try:
        trainer.train(job, callbacks=[Watcher()])
    except ValueError:
        # torch's agent ends all ranks as soon as one has failed: each prints its refusal first
        traceback.print_exc()
        dist.barrier()
        sys.exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
