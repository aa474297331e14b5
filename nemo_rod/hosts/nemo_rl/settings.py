"""A job of ours in NeMo-RL's own keys.

NeMo-RL's examples/configs/sft.yaml  <-  our rod.yaml  <-  the job  <-  the recipe's `nemo_rl`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rod.config import DTYPES
from nemo_rod.corpus.adapters.hub_files import name_and_revision
from nemo_rod.corpus.store import BlockStore
from nemo_rod.corpus.tokenizer import load_tokenizer
from nemo_rod.files import read_json
from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.installation import config_folder
from nemo_rod.jobs import ReferenceJob, TrainJob
from nemo_rod.layout import check_nodes
from nemo_rod.loggers import LOGGERS, project
from nemo_rod.trust import UntrustedCodeError

SECTIONS = ("policy", "logger", "cluster", "checkpointing")
# keys of the optimizer that only save memory
SAVES_MEMORY = (
    "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
    "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d",
)  # fmt: skip


def resolve_job(job: TrainJob | ReferenceJob, own: dict[str, Any]) -> dict[str, Any]:
    """Returns a job as NeMo-RL's sections and the key `worker`, as plain, checked values.

    Args:
        job: the job.
        own: the section `nemo_rl` of the recipe, which overrides the job.

    Raises:
        ValueError: NeMo-RL is missing, or a value is not valid.
    """
    compat.check_supported()
    from nemo_rl.utils.config import load_config, merge_with_override, register_omegaconf_resolvers

    register_omegaconf_resolvers()
    merged = load_config(compat.example_config())
    ours = load_config(config_folder() / "nemo_rl" / "rod.yaml")
    try:
        for layer in (ours, OmegaConf.create(of_job(job)), OmegaConf.create(own)):
            merged = merge_with_override(merged, layer)
        config: dict[str, Any] = {
            name: OmegaConf.to_container(merged[name], resolve=True, throw_on_missing=True)
            for name in SECTIONS
        }
    except OmegaConfBaseException as error:
        sentence = " ".join(str(error).split())
        raise ValueError(f"{sentence}: correct the section nemo_rl of the recipe.") from None
    if config["policy"].get("generation") is None:
        config["policy"].pop("generation", None)  # NeMo-RL expects a section or no key
    check(config, job)
    compat.run_config(config)  # NeMo-RL's own validation
    return {**config, "worker": merged.worker}


def of_job(job: TrainJob | ReferenceJob) -> dict[str, Any]:
    """Returns the keys of NeMo-RL that a job determines.

    The values come from the job rather than from our recipe, as an arm may differ from the recipe
    in any key. The processes are distributed over the nodes of `config.cluster`.

    Raises:
        ValueError: the layout does not fit the nodes; `NemoRL.check_arm` refuses the rest.
    """
    config, parallel, out = job.config, job.parallel, job.out
    per_node = min(parallel.world_size, config.cluster.gpus_per_node or parallel.world_size)
    check_nodes(parallel, per_node)
    file = Path(job.start) / "config.json"
    described = read_json(file) if file.is_file() else {}
    activation = described.get("text_config", described).get("hidden_act")
    optimizer: dict[str, Any] = {"bf16": config.model.precision == "bf16"}
    if parallel.distributed_optimizer is not None:
        optimizer["use_distributed_optimizer"] = parallel.distributed_optimizer
    megatron: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence,
        "bias_activation_fusion": activation == "silu",  # others Megatron may refuse
        "optimizer": optimizer,
    }
    policy = {
        "model_name": job.start,
        "max_total_sequence_length": config.domain.block_size,
        "precision": DTYPES[config.model.precision],
        "megatron_cfg": megatron,
    }
    values: dict[str, Any] = {
        "policy": policy,
        "cluster": {"gpus_per_node": per_node, "num_nodes": parallel.world_size // per_node},
        "checkpointing": {"checkpoint_dir": f"{out}/checkpoints"},
        "logger": {"log_dir": f"{out}/logs"},
    }
    if isinstance(job, ReferenceJob):
        size = config.scoring.micro_batch_size
        policy |= {"train_global_batch_size": size * parallel.data, "train_micro_batch_size": size}
        return values
    o = config.train
    policy |= {
        "train_global_batch_size": o.batch_size,
        "train_micro_batch_size": o.micro_batch_size,
        "max_grad_norm": o.clip_grad,
    }
    optimizer |= {
        "lr": o.lr,
        "min_lr": o.lr * o.min_lr_ratio,
        "weight_decay": o.weight_decay,
        **{key: getattr(o, key) for key in ("adam_beta1", "adam_beta2", "adam_eps")},
        "use_precision_aware_optimizer": o.precision_aware_optimizer,
        "optimizer_cpu_offload": o.optimizer_offload,
        "optimizer_offload_fraction": float(o.optimizer_offload),  # the share of its state
    }
    megatron["scheduler"] = {
        "lr_warmup_iters": o.warmup,
        "lr_wsd_decay_iters": o.decay,
        "lr_decay_iters": o.steps,
    }
    megatron["distributed_data_parallel_config"] = {"grad_reduce_in_fp32": o.grad_reduce == "fp32"}
    megatron["activation_checkpointing"] = o.recompute != "none"
    if o.recompute != "none":
        megatron["recompute_granularity"] = o.recompute  # v0.6.0 always recomputes all
    values["checkpointing"] |= {
        "save_period": config.checkpoint.every,
        "keep_top_k": config.checkpoint.keep,
    }
    values["logger"] |= {
        **{f"{name}_enabled": name in job.loggers for name in LOGGERS},
        "wandb": {"project": project("WANDB_PROJECT"), "name": job.run_name},
        "mlflow": {
            "experiment_name": project("MLFLOW_EXPERIMENT_NAME"),
            "tracking_uri": None,  # MLFLOW_TRACKING_URI of the environment
            "run_name": job.run_name,
        },
    }
    return values


def check(config: dict[str, Any], job: TrainJob | ReferenceJob) -> None:
    """Refuses, by a ValueError, keys of `nemo_rl` that cannot run or would change the training."""
    policy, megatron = config["policy"], config["policy"]["megatron_cfg"]
    context, batch = megatron["context_parallel_size"], policy["train_global_batch_size"]
    expected_batch = of_job(job)["policy"]["train_global_batch_size"]
    for valid, name, value, expected in (
        (megatron["enabled"], "policy.megatron_cfg.enabled", False,
         "true: workers of NeMo-RL's other backend cannot choose"),
        (not policy["sequence_packing"]["enabled"], "policy.sequence_packing.enabled", True,
         "false: it reorders blocks, and they are full already"),
        (not policy["dynamic_batching"]["enabled"], "policy.dynamic_batching.enabled", True,
         "false: it reorders blocks, and they have one length"),
        ("generation" not in policy, "policy.generation", "a section",
         "null: its temperature would scale the losses"),
        (context == 1, "context_parallel_size", context, "1: it splits the blocks to be scored"),
        (batch == expected_batch, "policy.train_global_batch_size", batch,
         f"{expected_batch}: train.batch_size sets it"),
        (policy["max_total_sequence_length"] == job.config.domain.block_size,
         "policy.max_total_sequence_length", policy["max_total_sequence_length"],
         f"{job.config.domain.block_size}: domain.block_size sets it"),
        *(
            (not megatron.get(key), f"policy.megatron_cfg.{key}", True,
             "false: it changes the output of the model's forward pass")
            for key in compat.FUSED_LOSS
        ),
    ):  # fmt: skip
        if not valid:
            raise ValueError(f"nemo_rl.{name} is {value!r}: expected {expected}.")


def open_store(config: dict[str, Any], job: TrainJob | ReferenceJob) -> BlockStore:
    """Opens the block store and checks that it matches the configured model.

    Raises:
        ValueError: the tokenizer differs, or NeMo-RL would run code that lies beside the checkpoint
            and is not trusted.
    """
    store, ours = BlockStore(job.blocks), job.config
    policy, trusted = config["policy"], ours.model.trust_remote_code
    if not trusted:  # NeMo-RL itself never asks
        for name in (policy["model_name"], policy["tokenizer"]["name"]):
            refuse_own_code(name)
    # names of special tokens are compared with the base's after the download
    is_renamed = ours.model.special_tokens == "renamed"
    name = ours.domain.tokenizer if is_renamed else policy["tokenizer"]["name"]
    eod = ours.domain.eod
    store.check_tokenizer(load_tokenizer(name, eod=eod, trust_remote_code=trusted))
    return store


def refuse_own_code(checkpoint: str) -> None:
    """Refuses a checkpoint, or tokenizer, with its own code, which NeMo-RL always runs.

    It is a folder, or a name on the hub.

    Raises:
        UntrustedCodeError: its config.json or tokenizer_config.json names such code.
    """
    for name in ("config.json", "tokenizer_config.json"):
        file = Path(checkpoint, name)
        if not Path(checkpoint).is_dir():
            from transformers.utils import cached_file

            repository, revision = name_and_revision(checkpoint)
            try:
                file = Path(str(cached_file(repository, name, revision=revision)))
            except OSError:  # the checkpoint has no such file
                continue
        if file.is_file() and json.loads(file.read_text("utf-8")).get("auto_map"):
            raise UntrustedCodeError(
                f"{name} of {checkpoint} names code of its own, which NeMo-RL would run: read "
                "that code and set model.trust_remote_code=true, or take a checkpoint without it."
            )
