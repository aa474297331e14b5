"""The keys of a recipe's `nemo_rl` section that determine the results of NeMo-RL's workers.

The section overrides the job, so these keys are inputs of the stages that the workers run. As
elsewhere, the layout and the keys that only save memory may change between two attempts.
"""

from __future__ import annotations

from typing import Any

from nemo_rod.config import Config
from nemo_rod.run.handover import Inputs, flatten

# Keys of the optimizer that only save memory.
SAVES_MEMORY = (
    "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
    "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d",
)  # fmt: skip
_DETERMINING = ("policy", "rod")  # the other sections are about machines, logs and checkpoints
_OF_THE_MACHINE = (
    "policy.env_vars", "policy.generation", "policy.logprob_batch_size",
    "policy.make_sequence_length_divisible_by", "policy.offload_optimizer_for_logprob",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.expert_tensor_parallel_size",
    "policy.megatron_cfg.context_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg.activation_checkpointing",
    "policy.megatron_cfg.recompute_granularity",
    "policy.megatron_cfg.recompute_method",
    "policy.megatron_cfg.recompute_modules",
    "policy.megatron_cfg.recompute_num_layers",
    "policy.megatron_cfg.empty_unused_memory_level",
    "policy.megatron_cfg.env_vars",
    "policy.megatron_cfg.distributed_data_parallel_config",
    *(f"policy.megatron_cfg.optimizer.{key}" for key in SAVES_MEMORY),
    "rod.hf", "rod.stall_seconds", "rod.trust_remote_code", "rod.validation",
    "rod.scoring.micro_batch_size",
)  # fmt: skip
_OF_TRAINING = (
    "policy.max_grad_norm", "policy.train_global_batch_size", "policy.train_micro_batch_size",
    "policy.optimizer", "policy.scheduler",
    "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler", "rod",
)  # fmt: skip


def overrides(config: Config) -> dict[str, Any]:
    """Returns the section `nemo_rl`: keys of NeMo-RL itself."""
    keys: dict[str, Any] = vars(config)["nemo_rl"]
    return keys


def determining_overrides(config: Config, *, scoring: bool) -> Inputs:
    """Returns the overrides that determine a model's losses, or else the result of training."""
    left_out = (*_OF_THE_MACHINE, *(_OF_TRAINING if scoring else ()))
    keys = overrides(config)
    sections = (flatten(name, keys[name]) for name in _DETERMINING if keys.get(name))
    values = {key: value for section in sections for key, value in section.items()}
    return {
        f"nemo_rl.{key}": value
        for key, value in values.items()
        if value != {} and not any(f"{key}.".startswith(f"{prefix}.") for prefix in left_out)
    }
