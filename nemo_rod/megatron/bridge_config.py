"""A training job as Megatron-Bridge's configuration."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training import config as settings
from megatron.bridge.training.tokenizers.config import TokenizerConfig

from nemo_rod.corpus.store import BlockStore
from nemo_rod.jobs import TrainJob
from nemo_rod.megatron.callbacks.show_metrics import logger_config
from nemo_rod.megatron.identity import ChosenBlocks, versions


def bridge_config(
    job: TrainJob, provider: Any, store: BlockStore, identity: dict[str, Any]
) -> settings.ConfigContainer:
    """Translates a job into Megatron-Bridge's configuration; weights are saved with `identity`."""
    o = job.config.train
    on_gpu, sharded = torch.cuda.is_available(), shares_optimizer(job)
    checkpoints = str(Path(job.out) / "checkpoints")
    return settings.ConfigContainer(
        model=provider,
        train=settings.TrainingConfig(
            train_iters=o.steps,
            global_batch_size=o.batch_size,
            micro_batch_size=o.micro_batch_size,
            eval_iters=0,
            eval_interval=o.steps,
            exit_signal_handler=True,
            manual_gc=on_gpu,  # collect on all ranks at the same steps: each waits for the slowest
            manual_gc_interval=100,
        ),
        optimizer=_optimizer(job, provider.params_dtype, sharded),
        scheduler=settings.SchedulerConfig(
            lr_decay_style="WSD",  # warm-up, stable, decay
            lr_wsd_decay_style="cosine",
            lr_warmup_iters=o.warmup,
            lr_decay_iters=o.steps,
            lr_wsd_decay_iters=o.decay,  # Bridge's default decay spans the whole run
            start_weight_decay=o.weight_decay,
            end_weight_decay=o.weight_decay,
            weight_decay_incr_style="constant",
            # an end may have been moved, or be that of a branch; `config_digest` has the rest
            override_opt_param_scheduler=True,
        ),
        ddp=settings.DistributedDataParallelConfig(
            grad_reduce_in_fp32=o.grad_reduce == "fp32",
            check_for_nan_in_grad=True,
            overlap_grad_reduce=on_gpu or sharded,
            overlap_param_gather=sharded,
            use_distributed_optimizer=sharded,
        ),
        dataset=ChosenBlocks(
            seq_length=store.block_size,
            identity=identity,
            versions=versions(),
            dataloader_type="external",
            num_workers=0,
            pin_memory=on_gpu,
        ),
        logger=logger_config(job),
        # the selector reads the tokens; the trainer only needs the vocabulary size
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=provider.vocab_size - 1
        ),
        checkpoint=settings.CheckpointConfig(
            save=checkpoints,
            load=checkpoints,
            save_interval=job.config.checkpoint.every,
            most_recent_k=job.config.checkpoint.keep,
            ckpt_format="torch_dist",
            async_save=False,
        ),
        dist=settings.DistributedInitConfig(
            distributed_backend=dist.get_backend(),
            distributed_timeout_minutes=job.collective_minutes,
        ),
        rng=settings.RNGConfig(seed=job.config.seed),
    )


def recompute(provider: Any, kind: str) -> None:
    """Makes a provider's model recompute activations in backward passes.

    Scoring keeps no activations, and so recomputes none.

    Args:
        provider: Megatron-Bridge's provider of the model.
        kind: "none"; "selective" for the core of attention, which matters where attention is not
            fused; or "full" for every layer, of which only the input is kept.
    """
    if kind == "none":
        return
    provider.recompute_granularity = kind
    if kind == "selective":
        provider.recompute_modules = ["core_attn"]
    else:
        provider.recompute_method, provider.recompute_num_layers = "uniform", 1


def refuse_optimizer(job: TrainJob) -> None:
    """Refuses an optimizer that this machine or the layout does not support.

    Raises:
        ValueError: the message has the key, the missing part and the value to set instead.
    """
    if not job.config.train.precision_aware_optimizer:
        return
    offload = job.config.train.optimizer_offload
    engine = importlib.util.find_spec("transformer_engine") is not None
    for refused, key, why, cure in (
        (not shares_optimizer(job), "precision_aware_optimizer",
         "needs an optimizer whose state replicas share",
         "set parallel.distributed_optimizer=true"),
        (offload and not torch.cuda.is_available(), "optimizer_offload",
         "moves the optimizer from a GPU to its host, and there is no GPU", "leave it out"),
        (not offload and not engine, "precision_aware_optimizer",
         "needs the Adam of TransformerEngine, which is not installed", "leave it out"),
    ):  # fmt: skip
        if refused:
            raise ValueError(f"train.{key}=true {why}: {cure}.")


def shares_optimizer(job: TrainJob) -> bool:
    """Returns whether replicas share the optimizer's state."""
    sharded = job.parallel.distributed_optimizer
    return torch.cuda.is_available() if sharded is None else sharded


def _optimizer(job: TrainJob, dtype: torch.dtype, sharded: bool) -> settings.OptimizerConfig:
    o = job.config.train
    # gradients reduced in bf16 need no copy in fp32 for an update that can read them
    narrow = (
        o.precision_aware_optimizer
        and o.grad_reduce == "bf16"
        and job.config.model.precision == "bf16"
    )
    return settings.OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.lr * o.min_lr_ratio,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
        bf16=job.config.model.precision == "bf16",
        fp16=False,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
        use_precision_aware_optimizer=o.precision_aware_optimizer,
        main_grads_dtype=torch.bfloat16 if narrow else torch.float32,
        optimizer_cpu_offload=o.optimizer_offload,
        optimizer_offload_fraction=1.0 if o.optimizer_offload else 0.0,
    )
