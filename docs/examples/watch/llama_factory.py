"""LLaMA-Factory's pretraining on Megatron-Bridge, watched by source.

USE_MEGATRON_BRIDGE=1 torchrun --nproc-per-node 8 llama_factory.py llama_factory.yaml
"""

from __future__ import annotations

from typing import Any

from llamafactory.train.tuner import run_exp
from megatron.bridge.training import pretrain as bridge

import nemo_rod

ROLES = {"/data/laws": "adaptation", "/data/web": "replay"}


def main() -> None:
    stock = bridge.pretrain

    def pretrain(cfg: Any, forward_step: Any) -> None:
        nemo_rod.watch("megatron_bridge", cfg, roles=ROLES)
        stock(cfg, forward_step)

    bridge.pretrain = pretrain  # which LLaMA-Factory imports when it starts the job
    run_exp()


if __name__ == "__main__":
    main()
