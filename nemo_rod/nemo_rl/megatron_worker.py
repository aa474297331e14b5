"""NeMo-RL's Megatron policy worker with RoD inside. Only its own processes import this module."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_rod.nemo_rl.worker import RoDWorkerMixin


class RoDMegatronPolicyWorkerImpl(RoDWorkerMixin, MegatronPolicyWorkerImpl):
    """Everything of the stock worker, and RoD's methods."""


# Empty, because Ray pickles what a decorated class itself holds, and cannot pickle all of it.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class RoDMegatronPolicyWorker(RoDMegatronPolicyWorkerImpl):
    """The Ray actor."""
