"""Saves two models under a layout each, merges them, and loads the merge under a third.

torchrun ... tests/workers/merging_worker.py PLAN.json

PLAN names Hugging Face checkpoints `base` and `adapted`, the layouts they are saved under, and the
`layout` of the merge. Every rank takes part in saving and loading; one merges. Beside the plan go
`merged`, and two Hugging Face checkpoints: `finetuned_hf`, of the model that a job has which starts
from the merge, and `exported_hf`, which Bridge's `export_ckpt` makes of it in one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nemo_rod.megatron  # noqa: F401  makes Megatron importable without CUDA
from nemo_rod.config import Parallel
from nemo_rod.lab.tasks import merge_checkpoints


def build(hf: Path, layout: dict[str, Any], precision: str) -> tuple[Any, list[Any]]:
    """A Hugging Face checkpoint as a Megatron model in a layout."""
    from megatron.core import parallel_state

    from nemo_rod.megatron.models import model_provider

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    bridge, provider = model_provider(
        str(hf), Parallel(**layout), precision=precision, block_size=64
    )
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


def load_to_finetune(model: list[Any], checkpoint: Path) -> None:
    """What a Megatron-Bridge job does first that has `pretrained_checkpoint`."""
    from megatron.bridge.training.checkpointing import load_checkpoint
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        LoggerConfig,
        OptimizerConfig,
    )
    from megatron.bridge.training.state import GlobalState
    from megatron.core.utils import get_model_config

    state = GlobalState()
    start = CheckpointConfig(pretrained_checkpoint=str(checkpoint), ckpt_format="torch_dist")
    state.cfg = ConfigContainer(
        model=get_model_config(model[0]),
        train=None,
        optimizer=OptimizerConfig(),
        ddp=None,
        scheduler=None,
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=None,
        checkpoint=start,
        dist=None,
    )
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    load_checkpoint(state, model, None, None)
    assert state.train_state.step == 0


def main() -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path = Path(sys.argv[1])
    plan, root = json.loads(path.read_text()), path.parent
    for side in ("base", "adapted"):
        bridge, model = build(root / side, plan[side], plan["precision"])
        bridge.save_megatron_model(model, root / f"{side}_megatron")
    if dist.get_rank() == 0:
        merge_checkpoints(
            root / "base_megatron", root / "adapted_megatron", root / "merged", plan["lambda"]
        )
    dist.barrier()
    bridge, model = build(root / "base", plan["layout"], plan["precision"])
    load_to_finetune(model, root / "merged")
    bridge.save_hf_pretrained(model, root / "finetuned_hf", show_progress=False)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            os.environ.pop(name, None)  # as without torchrun
        bridge.export_ckpt(root / "merged", root / "exported_hf", show_progress=False)


if __name__ == "__main__":
    main()
