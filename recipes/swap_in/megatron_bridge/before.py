"""A Megatron-Bridge pretraining job: `torchrun before.py DATA OUT CORPORA [BASE]`.

CORPORA are names of folders in DATA, with commas between them. BASE holds the checkpoints of a job
like this one, whose weights are the first. Small enough for a laptop: see `README.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def make_config(
    data: Path, out: Path, corpora: Sequence[str], base: Path | None = None, *, steps: int = 20
) -> Any:
    """The job's configuration: a GPT of two layers on a blend of corpora in equal parts."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training.config import (
        CheckpointConfig,
        ConfigContainer,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        GPTDatasetConfig,
        LoggerConfig,
        OptimizerConfig,
        RNGConfig,
        SchedulerConfig,
        TrainingConfig,
    )
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    on_gpu = torch.cuda.is_available()
    model = GPTModelProvider(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=64,
        vocab_size=256,
        normalization="RMSNorm",
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=steps,
            global_batch_size=8,
            micro_batch_size=2,
            eval_iters=1,
            eval_interval=10,
        ),
        optimizer=OptimizerConfig(optimizer="adam", lr=3e-3, min_lr=3e-4, clip_grad=1.0),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_decay_iters=steps,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
        ),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        dataset=GPTDatasetConfig(
            seq_length=64,
            random_seed=1234,
            blend=([f"{data}/{name}/text_document" for name in corpora], [1.0] * len(corpora)),
            split="90,5,5",
            dataloader_type="single",
            num_workers=0,
            pin_memory=on_gpu,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        ),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256),
        checkpoint=CheckpointConfig(
            save=str(out),
            load=str(out),
            pretrained_checkpoint=None if base is None else str(base),
            save_interval=5,
            ckpt_format="torch_dist",
        ),
        dist=DistributedInitConfig(distributed_backend="nccl" if on_gpu else "gloo"),
        rng=RNGConfig(seed=1234),
    )


def main() -> None:
    """Trains."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    data, out, corpora, *base = sys.argv[1:]
    cfg = make_config(Path(data), Path(out), corpora.split(","), *map(Path, base))
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    main()
