"""A NeMo 2.x pretraining job as anybody may have it: `torchrun before.py DATA OUT`.

Small enough for a laptop: `python -m nemo_rod.cpu.on_cpu nemo2 before.py DATA OUT`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

CORPORA = ("new", "old")


class Bytes:
    """A tokenizer as far as pretraining asks for one: its vocabulary has 256 tokens."""

    vocab_size, eod, unique_identifiers = 256, 255, {"tokenizer": "bytes"}


def make_job(
    data: Path, out: Path, *, steps: int = 20, corpora: tuple[str, ...] = CORPORA
) -> dict[str, Any]:
    """What `llm.pretrain` is called with: a GPT of two layers on a blend of corpora."""
    on_gpu = torch.cuda.is_available()
    blend = [part for name in corpora for part in ("1", str(data / name / "text_document"))]
    module = llm.PreTrainingDataModule(
        blend,
        seq_length=64,
        micro_batch_size=2,
        global_batch_size=8,
        tokenizer=Bytes(),
        split="900,50,50",
        num_workers=0,
        pin_memory=on_gpu,
    )
    config = llm.GPTConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=64,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=on_gpu,
        masked_softmax_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        apply_rope_fusion=False,
    )
    optimizer = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0)
    trainer = nl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_steps=steps,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        strategy=nl.MegatronStrategy(
            ddp=DistributedDataParallelConfig(check_for_nan_in_grad=False),
            ckpt_async_save=False,
        ),
    )
    checkpoints = nl.ModelCheckpoint(
        every_n_train_steps=4,
        save_last=True,
        save_top_k=-1,
        monitor=None,
        filename="{step}",
        save_optim_on_train_end=True,
    )
    return {
        "model": llm.GPTModel(
            config,
            optim=nl.MegatronOptimizerModule(config=optimizer),
            tokenizer=module.tokenizer,
        ),
        "data": module,
        "trainer": trainer,
        "log": nl.NeMoLogger(
            log_dir=str(out), name="job", use_datetime_version=False, ckpt=checkpoints
        ),
        "resume": nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True),
    }


if __name__ == "__main__":
    llm.pretrain(**make_job(Path(sys.argv[1]), Path(sys.argv[2])))
