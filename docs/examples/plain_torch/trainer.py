"""Continued pretraining with Replay on Demand by the Trainer of Hugging Face transformers.

torchrun trainer.py MODEL BLOCKS ADAPTATION_REFERENCES REPLAY_REFERENCES OUT [STEPS]

The same command resumes after an interruption. At the end, OUT/rod/report/index.html is its page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from nemo_rod import BlockStore, References, RoDBatches
from nemo_rod.lab.report import build_job_report

BATCH_SIZE, MICRO_BATCH_SIZE = 8, 2


class RoDTrainer(Trainer):
    """A Trainer whose batches are chosen at every step."""

    def __init__(self, *args: Any, batches: RoDBatches, **options: Any) -> None:
        super().__init__(*args, callbacks=[KeepStep(batches)], **options)
        self.batches = batches

    def get_train_dataloader(self) -> Any:
        return self.batches


class KeepStep(TrainerCallback):
    """Begins at the Trainer's step, and records its losses before a checkpoint is saved."""

    def __init__(self, batches: RoDBatches) -> None:
        self.batches = batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.batches.load_state_dict({"step": state.global_step})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        names = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/lr"}
        self.batches.end_step({names[key]: logs[key] for key in names if key in logs})


def train(model_folder: str, blocks: str, references: list[str], out: Path, steps: int) -> None:
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        learning_rate=1e-5,
        adam_beta2=0.95,
        weight_decay=0.1,
        logging_steps=1,  # `on_log` ends every step
        save_steps=max(1, steps // 2),
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # or processes without a GPU would train alone
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    store = BlockStore(blocks)
    batches = RoDBatches(
        model,
        store,
        References.open(references, store),
        steps=steps,
        batch_size=BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        held_out=BlockStore(blocks, split="holdout"),
        validation_every=max(1, steps // 10),
        out=out / "rod",
    )
    args.gradient_accumulation_steps = len(batches) // steps
    trainer = RoDTrainer(model, args, batches=batches)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if out.exists() else None)
    trainer.save_model(str(out / "hf"))
    if trainer.is_world_process_zero():
        build_job_report(out / "rod")


if __name__ == "__main__":
    model, blocks, adaptation, replay, out = sys.argv[1:6]
    train(model, blocks, [adaptation, replay], Path(out), int([*sys.argv, "100"][6]))
