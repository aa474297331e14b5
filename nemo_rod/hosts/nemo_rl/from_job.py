"""Jobs of our recipes as recipes of NeMo-RL."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.config import DTYPES
from nemo_rod.files import read_json
from nemo_rod.hosts.logger_runs import project
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.layout import check_nodes
from nemo_rod.loggers import LOGGERS


def nemo_rl_values(job: TrainJob | ReferenceJob, *, gpus_per_node: int = 0) -> dict[str, Any]:
    """Translates a job to sections of a NeMo-RL recipe, without keys set by NeMo-RL or `rod.yaml`.

    The values come from the job rather than from our recipe, as an arm may differ from the recipe
    in any key. The processes are distributed over nodes of `gpus_per_node`, unless it is 0.

    Raises:
        ValueError: the layout does not fit the nodes; `NemoRL.check_arm` refuses the rest.
    """
    config, block_size = job.config, job.config.domain.block_size
    parallel = job.parallel
    per_node = min(parallel.world_size, gpus_per_node or parallel.world_size)
    check_nodes(parallel, per_node)
    rod: dict[str, Any] = {
        "blocks": job.blocks,
        "out": job.out,
        "seed": config.seed,
        "stall_seconds": job.stall_seconds,
        "scoring": {"micro_batch_size": config.scoring.micro_batch_size},
        "eod": config.domain.eod,
        "trust_remote_code": config.model.trust_remote_code,
    }
    if config.model.special_tokens == "renamed":  # compared with the base's after the download
        rod["tokenizer"] = config.domain.tokenizer
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence,
        "bias_activation_fusion": _is_silu(Path(job.start) / "config.json"),
        "optimizer": {"bf16": config.model.precision == "bf16"},
    }
    if parallel.distributed_optimizer is not None:
        megatron["optimizer"]["use_distributed_optimizer"] = parallel.distributed_optimizer
    policy: dict[str, Any] = {
        "model_name": job.start,
        "max_total_sequence_length": block_size,
        "precision": DTYPES[config.model.precision],
        "megatron_cfg": megatron,
    }
    nodes = {"gpus_per_node": per_node, "num_nodes": parallel.world_size // per_node}
    values: dict[str, Any] = {"rod": rod, "policy": policy, "cluster": nodes}
    if isinstance(job, ReferenceJob):
        rod |= {"role": job.role, "model_digest": job.model_digest, "steps": 1}
        rod["wanted"] = job.wanted or None
        rod["lengths"] = [n for n in job.lengths if n < block_size]
        size = config.scoring.micro_batch_size
        policy |= {"train_global_batch_size": size * parallel.data, "train_micro_batch_size": size}
        return values
    merged: Any = OmegaConf.to_container(OmegaConf.merge(values, _training_values(job)))
    return merged


def _is_silu(file: Path) -> bool:
    """Returns whether a checkpoint's activation is one that Megatron surely fuses."""
    config = read_json(file) if file.is_file() else {}
    return config.get("text_config", config).get("hidden_act") == "silu"


def _training_values(job: TrainJob) -> dict[str, Any]:
    """Returns the values that only a training job sets."""
    config, o = job.config, job.config.train
    rod = {
        "arm": job.arm.name,
        "variant": asdict(job.arm),
        "config_digest": job.config_digest or None,
        "references": job.references,
        "steps": o.steps,
        "warmup_steps": o.warmup,
        "decay_steps": o.decay,
        "selection": {"on_nonfinite": config.selection.on_nonfinite},
        "validation": asdict(config.validation),
        "hf": True,
    }
    optimizer = {
        "lr": o.lr,
        "min_lr": o.lr * o.min_lr_ratio,
        "weight_decay": o.weight_decay,
        "adam_beta1": o.adam_beta1,
        "adam_beta2": o.adam_beta2,
        "adam_eps": o.adam_eps,
        "use_precision_aware_optimizer": o.precision_aware_optimizer,
        "optimizer_cpu_offload": o.optimizer_offload,
        "optimizer_offload_fraction": 1.0 if o.optimizer_offload else 0.0,
    }
    megatron: dict[str, Any] = {
        "optimizer": optimizer,
        "activation_checkpointing": o.recompute != "none",
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": o.grad_reduce == "fp32"},
    }
    if o.recompute != "none":
        megatron["recompute_granularity"] = o.recompute  # v0.6.0 always recomputes all
    policy = {
        "train_global_batch_size": o.batch_size,
        "train_micro_batch_size": o.micro_batch_size,
        "max_grad_norm": o.clip_grad,
        "megatron_cfg": megatron,
    }
    saved = config.checkpoint
    checkpointing = {"save_period": saved.every, "keep_top_k": saved.keep}
    logger = {
        **{f"{name}_enabled": name in job.loggers for name in LOGGERS},
        "wandb": {"project": project("WANDB_PROJECT"), "name": job.run_name},
        "mlflow": {
            "experiment_name": project("MLFLOW_EXPERIMENT_NAME"),
            "tracking_uri": None,  # MLFLOW_TRACKING_URI of the environment
            "run_name": job.run_name,
        },
    }
    return {"rod": rod, "policy": policy, "checkpointing": checkpointing, "logger": logger}
