"""LLaMA-Factory's own pretraining on Megatron-Bridge, without a GPU: HOW ROOT JOB.yaml.

`stock` runs it as it is, and `watch` by our example. Steps are in OUTPUT_DIR/steps.jsonl.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from nemo_rod import cpu

cpu.prepare()
cpu.prepare_bridge()


def main(how: str, root: Path) -> None:
    from megatron.bridge.training import pretrain as bridge
    from swap_in_worker import steps_writer

    from nemo_rod.cpu import trainers

    trainers.install_megatron_bridge()
    stock = bridge.pretrain

    def without_gpu(cfg: Any, forward_step: Any) -> None:
        cpu.adapt(cfg.model)
        stock(cfg, forward_step, callbacks=[steps_writer(Path(cfg.checkpoint.save), None)])

    bridge.pretrain = without_gpu
    if how == "stock":
        from llamafactory.train.tuner import run_exp

        run_exp()
    else:
        import llama_factory

        llama_factory.ROLES = {f"{root}/data/new": "adaptation", f"{root}/data/old": "replay"}
        llama_factory.main()


if __name__ == "__main__":
    torch.set_num_threads(1)
    how, root, *sys.argv[1:] = sys.argv[1:]
    main(how, Path(root))
