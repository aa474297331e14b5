"""NeMo-RL's Megatron policy worker with RoD. Only the worker processes import this module."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_rod.hosts.nemo_rl import compat
from nemo_rod.hosts.nemo_rl.worker import RoDWorkerMixin, whole_loads
from nemo_rod.megatron.objective import next_token_alone

compat.complete_vision_configs()


class RoDMegatronPolicyWorkerImpl(RoDWorkerMixin, MegatronPolicyWorkerImpl):
    """The stock worker with RoD's methods added, which trains the language model alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with whole_loads():  # NeMo-RL converts a checkpoint before it builds the model
            super().__init__(*args, **kwargs)

    @property
    def megatron_cfg(self) -> Any:
        """Megatron-Bridge's configuration, which the stock worker sets before it builds the model.

        NeMo-RL's keys reach some settings of the model's provider, those of vision towers only on
        main.
        """
        return self._megatron_cfg

    @megatron_cfg.setter
    def megatron_cfg(self, config: Any) -> None:
        next_token_alone(config.model)
        self._megatron_cfg = config


# Empty, because Ray pickles the decorated class's own members and cannot pickle all of them.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class RoDMegatronPolicyWorker(RoDMegatronPolicyWorkerImpl):
    """The Ray actor."""
