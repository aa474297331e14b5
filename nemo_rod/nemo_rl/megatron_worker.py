"""NeMo-RL's Megatron policy worker with RoD. Only the worker processes import this module."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_rod.nemo_rl.worker import RoDWorkerMixin


class RoDMegatronPolicyWorkerImpl(RoDWorkerMixin, MegatronPolicyWorkerImpl):
    """The stock worker with RoD's methods added."""


# Empty, because Ray pickles the decorated class's own members and cannot pickle all of them.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class RoDMegatronPolicyWorker(RoDMegatronPolicyWorkerImpl):
    """The Ray actor."""
