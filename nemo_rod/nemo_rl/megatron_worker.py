"""NeMo-RL's Megatron policy worker with RoD inside. Only its own processes import this module."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_rod.nemo_rl.worker import RoDWorkerMixin, Task


class RoDMegatronPolicyWorkerImpl(RoDWorkerMixin, MegatronPolicyWorkerImpl):
    """Everything of the stock worker, and RoD's methods."""

    def rod_setup(self, *, task: Task) -> None:
        """Refuses one more layout of memory, then as the mixin."""
        ddp_config = getattr(self.model, "ddp_config", None)
        if getattr(ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            raise ValueError(
                "Selection does not work with reuse_grad_buf_for_mxfp8_param_ag: weights and "
                "gradients share a buffer that scoring would read between two steps; set it to "
                "false."
            )
        super().rod_setup(task=task)


# Empty, because Ray pickles what a decorated class itself holds, and cannot pickle all of it.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class RoDMegatronPolicyWorker(RoDMegatronPolicyWorkerImpl):
    """The Ray actor."""
