"""NeMo-RL's own Megatron worker with RoD inside, on gloo: its `train` and `get_logprobs` unchanged.

Needs the Megatron that the checkout pins (a recursive clone) on the path. Only what builds and
saves the model is not the stock worker's: that code moves everything to CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace

import ray
import torch
from cpu_worker import OnCpu

from nemo_rod.nemo_rl.megatron_worker import RoDMegatronPolicyWorkerImpl


def _without_cuda() -> None:
    """What the stock worker calls besides what `nemo_rod.megatron.cpu` redirects."""
    to = torch.Tensor.to

    def stay(self, *args, **options):
        return self if args and str(args[0]).startswith("cuda") else to(self, *args, **options)

    torch.Tensor.to = stay
    torch.cuda.get_device_name = lambda *_: "cpu"
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None


class StockWorkerImpl(OnCpu, RoDMegatronPolicyWorkerImpl):
    def __init__(self, *args, **options):
        _without_cuda()
        super().__init__(*args, **options)
        self.mcore_state = SimpleNamespace(straggler_timer=None)
        self.dtype, self.defer_fp32_logits = torch.float32, False
        self.sampling_params = self.draft_model = None

    def train(self, *args, **options):
        # Ray pickles the methods of an actor, and v0.6.0's has a `.config` that pickle takes for
        # torch.distributed's, which no newer torch can pickle; so it is only named here
        return RoDMegatronPolicyWorkerImpl.train(self, *args, **options)


@ray.remote
class StockWorker(StockWorkerImpl):
    """The Ray actor."""
