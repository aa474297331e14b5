"""Which keys of the recipe's `nemo_rl` section decide what NeMo-RL's workers train or score.

The section overrides the job, so these keys are inputs of the stages that the workers run. As
elsewhere, the layout and what saves memory may change between two attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rod.config import Config
from nemo_rod.run.handover import Inputs, flatten

_DECIDING = ("policy", "rod")  # the other sections say where it runs and what is shown
_OF_THE_MACHINE = (
    "policy.dtensor_cfg", "policy.env_vars", "policy.generation", "policy.logprob_batch_size",
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
    "policy.megatron_cfg.optimizer.use_distributed_optimizer",
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer",
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload",
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction",
    "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
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


def overrides_of_training(config: Config) -> Inputs:
    """Returns the overrides that decide what an arm becomes."""
    return _overrides(config, without=_OF_THE_MACHINE)


def overrides_of_scoring(config: Config) -> Inputs:
    """Returns the overrides that decide a model's losses."""
    return _overrides(config, without=(*_OF_THE_MACHINE, *_OF_TRAINING))


def _overrides(config: Config, *, without: Sequence[str]) -> Inputs:
    keys = overrides(config)
    given = {key: flatten(key, keys[key]) for key in _DECIDING if keys.get(key)}
    found = {key: value for section in given.values() for key, value in section.items()}
    return {
        f"nemo_rl.{key}": value
        for key, value in found.items()
        if value != {} and not any(f"{key}.".startswith(f"{left_out}.") for left_out in without)
    }
