"""Runs a job on NeMo-RL's workers: our configuration in NeMo-RL's terms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from nemo_rod.config import DTYPES, Config
from nemo_rod.hosts.nemo_rl.recipe_keys import overrides
from nemo_rod.jobs import Job, ReferenceJob, TrainJob
from nemo_rod.loggers import LOGGERS, project


def run_on_nemo_rl(job: Job, config: Config) -> None:
    """Runs a training or scoring job on the Ray cluster and waits.

    Raises:
        ValueError: NeMo-RL does not support the job, or the configuration does not fit it.
        RuntimeError, Stopped: see `cluster.run`.
    """
    from nemo_rod.hosts.nemo_rl import cluster, settings

    if not isinstance(job, TrainJob | ReferenceJob):
        raise ValueError(f"{job.name} does not run on NeMo-RL: use launcher=local for it.")
    domain, trusted = config.domain, config.model.trust_remote_code
    gpus_per_node = config.cluster.gpus_per_node
    values = nemo_rl_values(job, block_size=domain.block_size, gpus_per_node=gpus_per_node)
    values["rod"] |= {"eod": domain.eod, "trust_remote_code": trusted}
    if config.model.special_tokens == "renamed":  # compared with the base's when that was fetched
        values["rod"]["tokenizer"] = domain.tokenizer
    merged: Any = OmegaConf.to_container(OmegaConf.merge(values, overrides(config)))
    command = "train" if isinstance(job, TrainJob) else "reference"
    cluster.run(command, settings.compose(merged))


def nemo_rl_values(
    job: TrainJob | ReferenceJob, *, block_size: int, gpus_per_node: int = 0
) -> dict[str, Any]:
    """Translates a job to sections of a NeMo-RL recipe, without keys set by NeMo-RL or `rod.yaml`.

    The values come from the job rather than from our recipe, as an arm may differ from the recipe
    in any key. A job that NeMo-RL's workers do not support is refused.
    """
    _refuse(job)
    parallel = job.parallel
    rod: dict[str, Any] = {
        "blocks": job.blocks,
        "out": job.out,
        "seed": job.seed,
        "stall_seconds": job.stall_seconds,
        "scoring": {"micro_batch_size": job.scoring_micro_batch_size},
    }
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence,
        "optimizer": {"bf16": job.precision == "bf16"},
    }
    if parallel.distributed_optimizer is not None:
        megatron["optimizer"]["use_distributed_optimizer"] = parallel.distributed_optimizer
    policy: dict[str, Any] = {
        "model_name": job.model,
        "max_total_sequence_length": block_size,
        "precision": DTYPES[job.precision],
        "megatron_cfg": megatron,
    }
    nodes = _nodes(parallel.world_size, gpus_per_node)
    values: dict[str, Any] = {"rod": rod, "policy": policy, "cluster": nodes}
    if isinstance(job, ReferenceJob):
        rod |= {"role": job.role, "model_digest": job.model_digest, "steps": 1}
        size = job.scoring_micro_batch_size
        policy |= {"train_global_batch_size": size * parallel.data, "train_micro_batch_size": size}
        return values
    merged: Any = OmegaConf.to_container(OmegaConf.merge(values, _of_training(job)))
    return merged


def _refuse(job: TrainJob | ReferenceJob) -> None:
    """Refuses what NeMo-RL's workers cannot do."""
    parallel, elsewhere = job.parallel, "use launcher=local or slurm"
    if job.scoring_precision is not None:
        raise ValueError(
            f"{job.name} has scoring.precision={job.scoring_precision}, which NeMo-RL's workers "
            f"cannot score in: {elsewhere}, or leave it unset."
        )
    if isinstance(job, TrainJob):
        refused = {
            "ends when it has converged": job.convergence,
            "estimates scores between scoring passes": job.arm.scored_every,
            "logs to a logger that NeMo-RL lacks": {*job.loggers} - {*LOGGERS} or None,
        }
        for what, value in refused.items():
            if value is not None:
                raise ValueError(f"{job.name} {what}: {elsewhere}.")
    if parallel.context > 1 or parallel.virtual_pipeline > 1:
        raise ValueError(
            f"parallel.context={parallel.context} and virtual_pipeline="
            f"{parallel.virtual_pipeline} do not run on NeMo-RL: set both to 1."
        )


def _of_training(job: TrainJob) -> dict[str, Any]:
    """What a training job sets besides what every job does."""
    o = job.optimisation
    rod = {
        "arm": job.arm.name,
        "variant": asdict(job.arm),
        "config_digest": job.config_digest or None,
        "references": job.references,
        "steps": o.steps,
        "warmup_steps": o.warmup,
        "decay_steps": o.decay,
        "selection": {"on_nonfinite": job.on_nonfinite},
        "validation": {"every": job.validation_every, "blocks": job.validation_blocks},
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
    checkpointing = {"save_period": job.checkpoint_every, "keep_top_k": job.checkpoint_keep}
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


def _nodes(processes: int, gpus_per_node: int) -> dict[str, int]:
    """Distributes the layout's processes over nodes of the configured size, if there is one."""
    per_node = min(processes, gpus_per_node or processes)
    if processes % per_node:
        raise ValueError(
            f"The layout's {processes} processes do not fill nodes of cluster.gpus_per_node="
            f"{per_node}: change parallel, or set nemo_rl.cluster.num_nodes and gpus_per_node."
        )
    return {"gpus_per_node": per_node, "num_nodes": processes // per_node}
