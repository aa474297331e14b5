"""A policy worker on gloo: RoD's mixin over a real Megatron-core model, driven by the real Policy.

It keeps the contract of NeMo-RL's MegatronPolicyWorkerImpl, which needs CUDA and a Megatron of its
own, over Megatron's schedule and optimizer.
"""

import os
import signal
from functools import partial
from pathlib import Path

import ray
import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.config import Model, Parallel
from nemo_rod.hosts.nemo_rl.worker import RoDWorkerMixin


class CpuWorkerImpl(RoDWorkerMixin):
    def __init__(
        self,
        config,
        tokenizer=None,
        processor=None,
        weights_path=None,
        optimizer_path=None,
        init_optimizer=True,
        init_reference_model=True,
        *,
        worker_sharding_annotations,
        **_,
    ):
        from megatron.bridge.training.config import (
            DistributedDataParallelConfig,
            OptimizerConfig,
            SchedulerConfig,
        )
        from megatron.bridge.training.optim import setup_optimizer
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        from nemo_rod.megatron.models import model_provider

        torch.set_num_threads(1)
        self.cfg, self.tokenizer, megatron = config, tokenizer, config["megatron_cfg"]
        dist.init_process_group("gloo")
        self.dp_size = worker_sharding_annotations.get_axis_size("data_parallel")
        self.megatron_bridge, provider = model_provider(
            config["model_name"],
            Parallel(
                data=self.dp_size,
                tensor=megatron["tensor_model_parallel_size"],
                pipeline=megatron["pipeline_model_parallel_size"],
            ),
            Model(precision={"float32": "fp32", "bfloat16": "bf16"}[config["precision"]]),
            block_size=config["max_total_sequence_length"],
        )
        provider.calculate_per_token_loss = True  # as NeMo-RL does: it normalises by itself
        provider.finalize()
        provider.initialize_model_parallel(seed=7)
        (self.model,) = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, average_in_collective=False
            ),
            wrap_with_ddp=init_optimizer,
        )
        get_model_config(self.model).finalize_model_grads_func = finalize_model_grads
        self.optimizer = self.scheduler = None
        if init_optimizer:
            scheduler = SchedulerConfig(**megatron["scheduler"])
            batch = config["train_global_batch_size"]
            scheduler.lr_decay_steps = scheduler.lr_decay_iters * batch
            scheduler.lr_warmup_steps = scheduler.lr_warmup_iters * batch
            scheduler.wsd_decay_steps = scheduler.lr_wsd_decay_iters * batch
            scheduler.wd_incr_steps = megatron["train_iters"] * batch
            optimizer = OptimizerConfig(**megatron["optimizer"])
            optimizer.finalize()
            self.optimizer, self.scheduler = setup_optimizer(
                optimizer_config=optimizer, scheduler_config=scheduler, model=[self.model]
            )
        if weights_path is not None:
            self._load(Path(weights_path))

    def save_checkpoint(
        self, weights_path, optimizer_path=None, tokenizer_path=None, checkpointing_cfg=None
    ):
        folder = Path(weights_path)
        folder.mkdir(parents=True, exist_ok=True)
        Path(optimizer_path).mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, folder / f"{dist.get_rank()}.pt")
        dist.barrier()

    def _load(self, folder):
        state = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def prepare_for_training(self, *_, **__): ...

    def finalize_async_save(self): ...

    def shutdown(self):
        return True

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, check_dim_skip_keys=None):
        from nemo_rl.algorithms.loss.utils import prepare_loss_input

        assert not eval_mode and data.size * self.dp_size == gbs, (data.size, gbs)
        _fail_if_told(self)
        self.model.train()
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        dist.all_reduce(tokens, group=self._rod_groups().dp)
        count = data.size // mbs

        def forward_step(batches, model):
            batch = next(batches)
            logits = model(
                input_ids=batch["input_ids"],
                position_ids=_positions(batch["input_ids"]),
                attention_mask=None,
            )
            return logits, partial(loss_of, batch)

        def loss_of(batch, logits):
            from megatron.core import parallel_state

            inputs, batch = prepare_loss_input(
                logits,
                batch,
                loss_fn,
                vocab_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
                vocab_parallel_group=parallel_state.get_tensor_model_parallel_group(),
                context_parallel_group=parallel_state.get_context_parallel_group(),
            )
            loss, metrics = loss_fn(
                data=batch, global_valid_seqs=None, global_valid_toks=tokens, **inputs
            )
            return loss * count, metrics  # the schedule divides by the number of micro-batches

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = self._schedule(forward_step, data, mbs)
        _, grad_norm, _ = self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=gbs)
        loss = torch.tensor([sum(metric["loss"] for metric in metrics)])
        groups = self._rod_groups()
        dist.broadcast(loss, group=groups.pp, group_src=groups.pp.size() - 1)
        dist.all_reduce(loss, group=groups.dp)
        return {
            "global_loss": loss, "grad_norm": torch.tensor([grad_norm]), "rank": dist.get_rank(),
            "gpu_name": "cpu", "model_dtype": torch.float32,
            "all_mb_metrics": {"lr": [lr] * count, "wd": [0.0] * count},
        }  # fmt: skip

    def _schedule(self, forward_step, data, size):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data.make_microbatch_iterator(size),
            model=[self.model], num_microbatches=data.size // size,
            seq_length=data["input_ids"].shape[1], micro_batch_size=size, forward_only=False,
        )  # fmt: skip


def _positions(input_ids):
    return torch.arange(input_ids.shape[1]).expand_as(input_ids).contiguous()


def _fail_if_told(worker):
    """A fault that a test asked for, on one rank, after a number of calls."""
    worker.calls = getattr(worker, "calls", 0) + 1
    fault, rank, call = os.environ.get("TEST_FAULT", "none:0:0").split(":")
    if fault == "none" or (dist.get_rank(), worker.calls) != (int(rank), int(call)):
        return
    if fault == "raise":
        raise ValueError("this worker was told to refuse")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


@ray.remote
class CpuWorker(CpuWorkerImpl):
    """The Ray actor."""
